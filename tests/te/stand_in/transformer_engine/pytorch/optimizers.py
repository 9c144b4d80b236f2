"""Adam that counts its updates in the parameter group, and norms of many tensors at once."""

import torch


def multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *args):
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    norms = torch.stack([x.float().norm() for x in tensor_lists[0]])
    return norms.norm()[None], norms if per_tensor else None


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        *,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        store_param_remainders=False,
    ):
        assert adam_w_mode and bias_correction and not (amsgrad or capturable or master_weights)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                first = state["exp_avg"] / (1 - beta1 ** group["step"])
                second = state["exp_avg_sq"] / (1 - beta2 ** group["step"])
                update = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * parameter
                parameter.sub_(group["lr"] * update)


FusedSGD = None  # Megatron imports this.
