"""Devices that are simulated: measured ones, and one from first principles."""

from __future__ import annotations

from poolweave.scheduler.cost_model import ArchitectureModel, DecodeStep, KVLink, Link
from poolweave.serving.calibration.calibration import Calibration
from poolweave.serving.simulator.config import Device


def calibrated(found: Calibration) -> Device:
    """The device that was measured; its instances are on one machine."""
    return Device(model=found.cost, kv_link=found.kv_link)


def llama2_13b_on_two_h800() -> Device:
    """Llama-2-13B, 16 bit, TP 2, as in MemServe §8: 13.0e9 parameters, 40 layers of 5,120.

    Computed at half of 2 x 990 TFLOP/s and 70% of 2 x 3.35 TB/s; 819,200 KV bytes a token; 40 GB/s to another
    instance. A pair of tokens costs 4 x 5,120 x 40 operations, half of them below the diagonal.
    """
    flops, bandwidth = 2 * 990e12 * 0.5, 2 * 3.35e12 * 0.7
    parameters, kv_bytes = 13.0e9, 819_200
    pair_s = 4 * 5120 * 40 / 2 / flops
    return Device(
        model=ArchitectureModel(
            constant_s=2 * parameters / bandwidth,  # a short prompt still reads all weights
            linear_s=2 * parameters / flops,
            quadratic_s=pair_s,
            quadratic_cached_s=-pair_s,
            decode=DecodeStep(
                constant_s=2 * parameters / bandwidth,
                per_sequence_s=2 * parameters / flops,
                per_kv_token_s=kv_bytes / bandwidth,
            ),
        ),
        kv_link=KVLink(link=Link(bytes_per_s=40e9, latency_s=1e-3, per_call_s=5e-6), bytes_per_token=kv_bytes),
    )
