"""Attentions for ``peers_run`` that crash, hang, lose the device or are sound; found by name, in other processes."""

import os
import time

from flamia.audit.controls import attend, block_scaled

calls = [0]


def sound(q, k, v, cu_seqlens):
    return attend(q, k, v, cu_seqlens)


def leaky(q, k, v, cu_seqlens):
    return block_scaled("v", 32)(q, k, v, cu_seqlens)


def dies(q, k, v, cu_seqlens):
    if q.shape[1] == k.shape[1]:
        os.abort()
    return attend(q, k, v, cu_seqlens)


def hangs(q, k, v, cu_seqlens):
    if q.shape[1] == 4:
        time.sleep(1000)
    return attend(q, k, v, cu_seqlens)


def device_lost(q, k, v, cu_seqlens):
    """From the twelfth call on, in the words of a process whose GPU context is gone."""
    calls[0] += 1
    if calls[0] > 11:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return attend(q, k, v, cu_seqlens)
