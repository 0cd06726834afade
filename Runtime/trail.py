"""With --debug: a trail through the network, so that a crash below Python ends in a sentence with its module's name.

Before each module runs, forward or backward, its name goes into the breadcrumb of Runtime/watchdog.py, which survives
the death of the process. Without --debug nothing is registered, and a step costs what it did.
"""
import torch

from Runtime import watchdog

MARK = "trail"  # in the metadata of a node of the graph: an inner module has it already


def follow(net):
    """Note every module of a network as it runs. Call this once, before the network is wrapped. Returns: how many."""
    open_modules, count = [], 0
    for name, module in net.named_modules():
        label = f"{name or 'the network itself'} ({type(module).__name__})"
        module.register_forward_pre_hook(enter(open_modules, label))
        module.register_forward_hook(leave(open_modules, label), always_call=True)
        count += 1
    return count


def enter(open_modules, label):
    """The hook that notes a module before its forward. open_modules: labels from the outermost to the innermost."""
    def hook(module, inputs):
        open_modules.append(label)
        watchdog.inside(label)
    return hook


def leave(open_modules, label):
    """The hook behind a module's forward: back in the module around it; and its backward will be noted too."""
    def hook(module, inputs, output):
        while open_modules and open_modules.pop() != label:  # those that an exception has left
            pass
        watchdog.inside(open_modules[-1] if open_modules else "")
        note_backward(output, label)
    return hook


def note_backward(output, label):
    """Have the backward pass note a module before it goes through it. output: of its forward, nested lists and dicts.

    The last operation of a module is that of the module around it too: the inner one counts, which comes first here.
    """
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        for part in output:
            note_backward(part, label)
    elif isinstance(output, torch.Tensor) and output.grad_fn is not None and MARK not in output.grad_fn.metadata:
        output.grad_fn.metadata[MARK] = label
        output.grad_fn.register_prehook(lambda gradients: watchdog.inside(f"backward of {label}"))
