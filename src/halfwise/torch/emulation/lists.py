"""What CUDA's autocast does with each operation, frozen from PyTorch 2.13, and whether another PyTorch differs.

Source: the `AT_FORALL_*` macros of `ATen/autocast_mode.h`, and `binary_cross_entropy`, which `autocast_mode.cpp`
refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

__all__ = ["CARELESS", "CATEGORIES", "RECURRENT", "Category", "drift", "header_lists"]

Category = Literal["lower_precision", "float32", "float32_set_opt_dtype", "float32_append_dtype", "widest", "refused"]
"""What happens to an operation's floating arguments, or, for those with `dtype`, to its result."""

_LOWER_PRECISION = """
_convolution _convolution.deprecated _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell
addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv prelu
rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
"""
_FLOAT32 = """
_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div l1_loss
layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
native_layer_norm nll_loss nll_loss2d nuclear_norm nuclear_norm.dim pdist poisson_nll_loss pow.Scalar
pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan
triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
upsample_nearest3d upsample_trilinear3d
"""
_SET_OPT_DTYPE = """
cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int prod prod.dim_int
softmax.int sum sum.dim_IntList
"""
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"

CATEGORIES: Mapping[str, Category] = MappingProxyType(
    {
        **dict.fromkeys(_LOWER_PRECISION.split(), "lower_precision"),
        **dict.fromkeys(_FLOAT32.split(), "float32"),
        **dict.fromkeys(_SET_OPT_DTYPE.split(), "float32_set_opt_dtype"),
        **dict.fromkeys(("norm.Scalar", "norm.ScalarOpt_dim"), "float32_append_dtype"),
        **dict.fromkeys(_WIDEST.split(), "widest"),
        "binary_cross_entropy": "refused",
    }
)
"""Operation, with its overload's name where that is not the default one -> what CUDA's autocast does with it."""

RECURRENT = tuple(f"{name}.{kind}" for name in ("gru", "lstm", "rnn_relu", "rnn_tanh") for kind in ("data", "input"))
"""Operations that stand on no list: on CUDA cuDNN's kernel inside them casts to the lower precision."""

CARELESS = ("adaptive_avg_pool3d", "avg_pool3d", "batch_norm", "col2im", "im2col", "rrelu")
"""Operations on no list that a CPU lacks in half precision, or sums up in it where CUDA's kernel keeps float32 inside.

Found by comparing each operation that PyTorch tests, and larger sums, with float32 rounded to half.
"""

_OUTSIDE_OF_THE_HEADER = frozenset({"cudnn_convolution", "cudnn_convolution_transpose", "binary_cross_entropy"})

_MACROS: Mapping[str, Category] = {
    "AT_FORALL_LOWER_PRECISION_FP": "lower_precision",
    "AT_FORALL_FP32": "float32",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "float32_set_opt_dtype",
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": "float32_append_dtype",
    "AT_FORALL_PROMOTE": "widest",
}


def drift() -> tuple[str, ...]:
    """How the installed PyTorch differs from the table, one sentence for each operation; empty where it does not.

    >>> drift() if torch.__version__.startswith("2.13") else ()
    ()
    """
    found = list(_differences(header_lists()))
    registered = _registered()
    mine = set(CATEGORIES) | _OUTSIDE_OF_THE_HEADER
    found += [f"{name} has a kernel for CUDA's autocast and is not in the table" for name in sorted(registered - mine)]
    found += [f"{name} is in the table and has no kernel for CUDA's autocast" for name in sorted(mine - registered)]
    return tuple(found)


def _differences(installed: Mapping[str, Category]) -> list[str]:
    if not installed:
        return []  # an installation without headers
    mine = {name: category for name, category in CATEGORIES.items() if name not in _OUTSIDE_OF_THE_HEADER}
    nowhere = "on no list"
    return [
        f"{name} is {installed.get(name, nowhere)} in the installed PyTorch, {mine.get(name, nowhere)} in the table"
        for name in sorted(mine.keys() | installed.keys())
        if mine.get(name) != installed.get(name)
    ]


def header_lists() -> dict[str, Category]:
    """The lists of the installed PyTorch's header; empty where there is none."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.is_file():
        return {}
    text = header.read_text(encoding="utf-8").replace("\\\n", "\n")
    found: dict[str, Category] = {}
    for macro, category in _MACROS.items():
        body = re.search(rf"#define {macro}\(_\)(.*?)(?=\n\s*\n|#)", text, re.DOTALL)
        if body is None:
            continue
        if category == "float32_append_dtype":
            names = re.findall(r'"(\w+(?:\.\w+)?)"', body[1])
        else:
            entries = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body[1])
            names = [f"{name}.{overload}" if overload else name for name, overload in entries]
        found.update(dict.fromkeys(names, category))
    return found


def _registered() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        name.removeprefix("aten::") for name in names if name.startswith("aten::") and has_kernel(name, "AutocastCUDA")
    }
