"""Linear layers: plain, behind a norm, and one for each of several experts."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from transformer_engine.pytorch.distributed import into_column, out_of_row, set_tensor_model_parallel_attributes
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.norms import rms_norm

KEYWORDS = {
    "sequence_parallel": False,
    "fuse_wgrad_accumulation": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "init_method": None,
    "bias": True,
    "return_bias": False,
    "params_dtype": None,
    "parallel_mode": None,
    "device": "cuda",
    "ub_name": None,
    "delay_wgrad_compute": False,
}
DENSE = {"parameters_split": None, "symmetric_ar_type": None}


def chosen(given, **own):
    """Return all keywords of a layer. Raises TypeError for one that Transformer Engine's does not have."""
    known = KEYWORDS | own
    if unknown := given.keys() - known.keys():
        raise TypeError(f"unexpected keywords {sorted(unknown)}")
    how = SimpleNamespace(**known | given)
    assert not how.delay_wgrad_compute
    return how


class _Linear(TransformerEngineBaseModule):
    """`num_gemms` weights of the same shape; None stands for one, called `weight`."""

    def _build(self, num_gemms, in_features, out_features, how):
        assert how.parallel_mode in (None, "column", "row")
        self._join(how.tp_group, how.tp_size)
        self.parallel_mode = how.parallel_mode
        self.in_features = in_features // (self.tp_size if how.parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if how.parallel_mode == "column" else 1)
        self.sequence_parallel = self.tp_size > 1 and how.sequence_parallel
        self.fuse_wgrad_accumulation = how.fuse_wgrad_accumulation
        assert not self.fuse_wgrad_accumulation, "gradient_accumulation_fusion"
        self.ub_name = how.ub_name
        self.use_bias = how.bias
        self.return_bias = how.return_bias
        self.apply_bias = how.bias and not how.return_bias
        dtype = how.params_dtype or torch.get_default_dtype()
        init = how.init_method or (lambda weight: torch.nn.init.normal_(weight, std=0.023))
        stream = getattr(how, "rng_tracker_name", None)
        for index in range(num_gemms or 1):
            suffix = "" if num_gemms is None else str(index)
            shape = (self.out_features, self.in_features)
            self._make(f"weight{suffix}", shape, dtype, how.device, init, how.get_rng_state_tracker, stream)
            weight = getattr(self, f"weight{suffix}")
            set_tensor_model_parallel_attributes(weight, True, int(how.parallel_mode == "row"), 1)
            if not how.bias:
                setattr(self, f"bias{suffix}", torch.empty(0, dtype=dtype, device=how.device))
                continue
            self._make(f"bias{suffix}", (self.out_features,), dtype, how.device, torch.nn.init.zeros_)
            added = getattr(self, f"bias{suffix}")
            if how.parallel_mode == "row":
                added.sequence_parallel = self.sequence_parallel
            elif how.parallel_mode == "column":
                set_tensor_model_parallel_attributes(added, True, 0, 1)

    def _multiply(self, x):
        self._check(x)
        if self.parallel_mode == "column" and self.tp_size > 1:
            x = into_column(x, self.tp_group, self.sequence_parallel)
        row = self.parallel_mode == "row" and self.tp_size > 1
        out = F.linear(x, self.weight, self.bias if self.apply_bias and not row else None)
        if row:
            out = out_of_row(out, self.tp_group, self.sequence_parallel)
            out = out + self.bias if self.apply_bias else out
        return (out, self.bias) if self.return_bias else out


class Linear(_Linear):
    def __init__(self, in_features, out_features, **given):
        super().__init__()
        how = chosen(given, **DENSE, rng_tracker_name=None, save_original_input=False)
        assert how.parameters_split is None and how.symmetric_ar_type is None
        self.save_original_input = how.save_original_input
        self.rng_tracker_name = how.rng_tracker_name
        self._build(None, in_features, out_features, how)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        return self._multiply(inp)


class LayerNormLinear(_Linear):
    def __init__(self, in_features, out_features, eps=1e-5, **given):
        super().__init__()
        own = {"normalization": "LayerNorm", "zero_centered_gamma": False}
        own |= {"return_layernorm_output": False, "return_layernorm_output_gathered": False}
        how = chosen(given, **DENSE, **own)
        assert how.normalization == "RMSNorm" and not how.zero_centered_gamma
        assert how.parameters_split is None and how.symmetric_ar_type is None
        assert not how.return_layernorm_output and not how.return_layernorm_output_gathered
        self.eps = eps
        dtype = how.params_dtype or torch.get_default_dtype()
        self._make("layer_norm_weight", (in_features,), dtype, how.device, torch.nn.init.ones_)
        self.layer_norm_bias = None
        self._build(None, in_features, out_features, how)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        self._check(inp)
        return self._multiply(rms_norm(inp, self.layer_norm_weight, self.eps))


class GroupedLinear(_Linear):
    """The caller has dispatched the tokens, so no rank communicates here."""

    def __init__(self, num_gemms, in_features, out_features, **given):
        super().__init__()
        how = chosen(given, rng_tracker_name=None)
        self.num_gemms = num_gemms
        self.rng_tracker_name = how.rng_tracker_name
        self._build(num_gemms, in_features, out_features, how)

    def forward(self, inp, m_splits, is_first_microbatch=None):
        self._check(inp)
        assert len(m_splits) == self.num_gemms and sum(m_splits) == inp.shape[0]
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        parts = zip(inp.split(m_splits), weights, biases, strict=True)
        out = torch.cat([F.linear(x, w, b if self.apply_bias else None) for x, w, b in parts])
        return (out, biases) if self.return_bias else out
