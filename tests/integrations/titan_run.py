"""TorchTitan's own trainer: `python titan_run.py FOLDER llama3 cpu` (or qwen3, or cuda) trains a debug model and prints its
losses as JSON.

A script, since the trainer starts torch.distributed. TorchTitan asks for an accelerator; a stand-in answers for the CPU.
Steps are taken one by one: after its first step `Trainer.train` of 0.3.0 calls `torch.distributed.set_timeout`, which
released versions of torch up to 2.13 do not have. Torch 2.11 lacks a name that is imported for several GPUs, and its FSDP does
not go with TorchTitan's loss in chunks: there, the loss is computed whole.
"""

import collections
import importlib
import json
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed.fsdp
import torchtitan.tools.utils
from tokenizers import Tokenizer, models, pre_tokenizers

STEPS = 4
OLD = not hasattr(torch.distributed.fsdp, "DataParallelMeshDims")


class Device(types.ModuleType):
    """What TorchTitan's trainer asks of `torch.cuda`."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def get_device_name(self, device=None):
        return "cpu"

    def get_device_properties(self, device=None):
        return types.SimpleNamespace(total_memory=2**34, name="cpu")

    def reset_peak_memory_stats(self, *device):
        pass

    def empty_cache(self):
        pass

    def memory_stats(self, *device):
        return collections.defaultdict(int)


def prepare(folder: Path) -> None:
    """A byte tokenizer and a small text."""
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet | {"<s>": 256, "</s>": 257}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "data").mkdir()
    texts = [f"one two three four {i} " * 3 for i in range(40)]
    (folder / "data" / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def main(folder: Path, family: str, device: str) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", HF_DATASETS_OFFLINE="1")
    os.environ["MASTER_PORT"] = str(20_000 + os.getpid() % 20_000)
    if device == "cpu":
        torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", Device("cpu")
    if OLD:
        torch.distributed.fsdp.DataParallelMeshDims = object
    registry = importlib.import_module(f"torchtitan.models.{family}")
    configurations = importlib.import_module(f"torchtitan.models.{family}.config_registry")
    from flamia.integrations.torchtitan import Attention, AttentionConverter, SelectiveAC

    prepare(folder)
    config = getattr(configurations, f"{family}_debugmodel")()
    converters = [AttentionConverter.Config(recipe="mxfp8/strict" if device == "cpu" else "")]
    config.model_spec = registry.model_registry("debugmodel", attn_backend="varlen", converters=converters)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.activation_checkpoint = SelectiveAC.Config()
    config.training.disable_cuda_graphs = True  # as for its own varlen attention: numbers of documents change
    if OLD:
        config.loss = config.loss.loss_fn
    config.hf_assets_path, config.dump_folder = str(folder), str(folder / "out")
    config.dataloader.dataset_path = str(folder / "data")
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 1, 128, STEPS
    config.validator.enable = config.checkpoint.enable = False
    trainer = config.build()
    (model,) = trainer.model_parts
    assert sum(isinstance(module, Attention) for module in model.modules()) == 2
    losses = []
    trainer.metrics_processor.log = lambda step, loss, *others, **more: losses.append(loss)
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(STEPS):
        trainer.step += 1
        trainer.train_step(batches)
    torch.distributed.destroy_process_group()
    print(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
