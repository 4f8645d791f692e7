"""Peers with few options, so that a test takes a second."""

import torch

from flamia.audit.peer_calls import named, names_of
from flamia.audit.peer_modules import peers
from flamia.audit.peer_report import audit_peers
from flamia.audit.peers import Axes, Peer

ONE = {"grouped": (True,), "dtype": (torch.bfloat16,)}
KNOWN = {peer.name: peer for peer in peers()}


def peer_of(fn, name="toy", build=None, **axes):
    """A peer with few options, so that a test takes a second."""
    given = {"packing": ("packed",), "causal": (True,), "windowed": (False,)} | ONE | axes
    return Peer(name, "", lambda: (build or named(fn, names_of(fn)), Axes(**given)))


def narrowed(name, **axes):
    """A peer of the list under fewer options."""
    call, _ = KNOWN[name].build()
    given = {"causal": (True,), "windowed": (False,)} | ONE | axes
    return Peer(name, "", lambda: (call, Axes(**given)), promises=KNOWN[name].promises)


def swept(*peers, **options):
    return audit_peers(peers, effort="spot", head_dim=16, **options)


def verdicts(result):
    return {str(row.options): row.verdict for row in result.rows}
