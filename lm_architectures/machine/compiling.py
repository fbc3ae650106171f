"""torch.compile: the options that training needs, and what is compiled together."""
import torch


def set_compiler_options():
    """Set the options of torch.compile that training needs."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    torch._dynamo.config.recompile_limit = 64  # one block-mask function serves all patterns
    torch._dynamo.config.optimize_ddp = False  # DDP's graph splitter does not support FlexAttention
    functorch.backward_pass_autocast = 'off'  # as in eager mode: fp32 operations have an fp32 backward
    inductor.triton.mix_order_reduction = False  # it gives wrong gradients (PyTorch issue 193061)


def compile_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the compiled model. Compiles a model with `blocks` in place, part by part.

    Equal blocks compile once, which is several times faster than compiling all layers as one graph.
    Parts with `dynamic = True`, such as attn_kernels.CrossEntropy, compile once for inputs of all
    lengths. They are parts of the loss, which runs outside of the model's own graph.
    """
    in_parts = any(hasattr(module, 'blocks') for module in model.modules())
    for part in _parts(model):
        dynamic = getattr(part, 'dynamic', None)
        if in_parts or dynamic:
            part.compile(dynamic=dynamic)
    return model if in_parts else torch.compile(model)


def _parts(module):
    """Yield the elements of a model's module lists, and its other parts that are not PyTorch's."""
    for child in module.children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)):
            yield from child
        elif hasattr(child, 'blocks'):
            yield from _parts(child)
        elif not type(child).__module__.startswith('torch.'):
            yield child
