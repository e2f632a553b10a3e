"""How adapters begin. All numbers are drawn on the CPU in the order of layer names, so a seed means the same on every device.

Dimensions: I and O a layer's inputs and outputs, R rank, E experts, K columns of a sketch.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from core.contracts import LoraSettings
from core.errors import InvalidInput
from engine.lora.adapter import Adapter, Factors, Gate

SKETCH_EXTRA = 8
SKETCH_ITERATIONS = 8


def adapted_layers(settings: LoraSettings, layers: Mapping[str, tuple[int, int]]) -> list[str]:
    """Names of the base's layers that an adapter of this shape has a part in, sorted."""
    return [name for name in sorted(layers) if name.rsplit(".", 1)[-1] in settings.target_modules and settings.rank_of(name) > 0]


def new_adapter(
    settings: LoraSettings,
    layers: Mapping[str, tuple[int, int]],
    *,
    seed: int,
    device: torch.device,
    base_weight: Callable[[str], Tensor] | None = None,
) -> Adapter:
    """A fresh adapter, whose output is the base's: exactly, or up to rounding with pissa.

    default: A uniform by Kaiming with a = sqrt(5) as in PEFT (bound 1 / sqrt(I)), B zero. orthogonal: A with orthonormal rows, B zero.
    pissa: B A is the base's best approximation of that rank and a frozen part takes it away again, which is to train the principal
    components while the base stays shared (Meng et al. 2024, arXiv:2404.02948, eq. 2 to 4; here by a randomised SVD).
    A mixture's gates are zero: equal shares. Kind full: the change is zero.

    Args:
        layers: (inputs, outputs) of each layer of the base that can take an adapter, by name.
        base_weight: the base's weight [O, I] of a layer; pissa needs it.
    Raises:
        InvalidInput: the rank is more than a layer can have with this init.
    """
    generator = torch.Generator().manual_seed(seed)
    adapter = Adapter(settings, {}, seed=seed)
    for name in adapted_layers(settings, layers):
        num_inputs, num_outputs = layers[name]
        if settings.kind == "full":
            adapter.dense[name] = torch.zeros(num_outputs, num_inputs, device=device)
            continue
        rank, scale = settings.rank_of(name), settings.scaling_of(name)
        if settings.init == "pissa":
            assert base_weight is not None, "pissa starts from the base's weights"
            _check_rank(rank, min(layers[name]), name)
            a_RI, b_OR = _principal(base_weight(name).float(), rank, generator)
            a_RI, b_OR = a_RI / math.sqrt(scale), b_OR / math.sqrt(scale)
            anchor = Factors(a_RI.clone(), b_OR.clone(), -scale, "anchor", trainable=False)
            adapter.factors[name] = (anchor, Factors(a_RI, b_OR, scale))
            continue
        if settings.init == "orthogonal":
            _check_rank(rank, num_inputs, name)
            a_RI = torch.cat([_orthonormal(rank, num_inputs, generator) for _ in range(settings.num_experts)])
        else:
            a_RI = torch.empty(rank * settings.num_experts, num_inputs)
            nn.init.kaiming_uniform_(a_RI, a=math.sqrt(5), generator=generator)
        gate = _equal_gate(settings.num_experts, num_inputs, device) if settings.num_experts > 1 else None
        adapter.factors[name] = (Factors(a_RI.to(device), torch.zeros(num_outputs, len(a_RI), device=device), scale, gate=gate),)
    return adapter


def _equal_gate(num_experts: int, num_inputs: int, device: torch.device) -> Gate:
    mean_E = torch.full((num_experts,), 1 / num_experts, device=device)
    return Gate(torch.zeros(num_experts, num_inputs, device=device), mean_E, torch.zeros_like(mean_E))


def _orthonormal(rank: int, num_inputs: int, generator: torch.Generator) -> Tensor:
    q_IR, r_RR = torch.linalg.qr(torch.randn(num_inputs, rank, generator=generator))
    # The sign of a column is LAPACK's choice; fixing it makes the result uniform over orthonormal frames (Mezzadri 2007).
    return (q_IR * r_RR.diagonal().sign()).t().contiguous()


def _principal(weight_OI: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A [R, I] and B [O, R] with B A the best approximation of this rank, singular values split evenly over both.

    Randomised subspace iteration (Halko et al. 2011, arXiv:0909.4061, algorithm 4.4).
    """
    num_columns = min(rank + SKETCH_EXTRA, *weight_OI.shape)
    q_IK = torch.randn(weight_OI.shape[1], num_columns, generator=generator).to(weight_OI.device)
    for _ in range(SKETCH_ITERATIONS):
        q_OK = torch.linalg.qr(weight_OI @ q_IK)[0]
        q_IK = torch.linalg.qr(weight_OI.t() @ q_OK)[0]
    u_OK, singular_K, v_KK = torch.linalg.svd(weight_OI @ q_IK, full_matrices=False)
    root_R = singular_K[:rank].sqrt()
    a_RI = root_R[:, None] * (v_KK[:rank] @ q_IK.t())
    return a_RI.contiguous(), (u_OK[:, :rank] * root_R).contiguous()


def _check_rank(rank: int, most: int, layer: str) -> None:
    if rank > most:
        raise InvalidInput(f"Rank {rank} is more than layer {layer} can have with this init; {most} is the most.", param="lora.rank")
