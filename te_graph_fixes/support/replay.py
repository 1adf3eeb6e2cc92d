"""The steps of a replay, their order, and the objects that contain the facts about its capture.

A *callable* here is a graphed module or function, for one microbatch only. Its `Replay` has the record of its capture,
and the steps that fixes have added. TE's forward, backward and `backward_dw` run these steps in phases:

================  ==================================================================  ==============================
phase             when                                                                arguments of a step
================  ==================================================================  ==============================
forward check     after TE's own checks of the arguments                              call
forward prepare   before TE copies inputs and replays the forward, without grad mode  call
forward deliver   after the replay, before autograd records the outputs               ctx, outputs -> outputs
backward check    at the start of `Graphed.backward`                                  ctx (``ctx.call``: the call)
backward prepare  before TE copies grad outputs and replays the dgrad                 ctx
backward deliver  after the replay of the dgrad and TE's update of FP8 scales         ctx, gradients -> gradients
wgrad check       in `backward_dw`, if a wgrad was captured                           no arguments
wgrad prepare     before the replay of the wgrad                                      ``None``
wgrad deliver     after the replay of the wgrad, before TE runs hooks of gradients    no arguments
================  ==================================================================  ==============================

Only a check may refuse a replay, by raising an error. A check writes only to its call, so a refused replay changes no
other state. A step of a ``prepare`` phase may borrow state, which means that it changes the state only for the replay
and returns a function that restores it. This function is called before the ``deliver`` phase, even if TE's replay
fails. Other changes by the step remain.

Within a phase, the steps run in the order of `ORDER`. The functions that restore borrowed state run in reverse order.

The capture of a callable collects these facts, which no replay changes. `Replay.reset` drops them with all steps:

======================================================  ====================================  =======================
fact                                                    object                                module
======================================================  ====================================  =======================
FP8 states that the forward uses                        ``Replay.fp8_state`` (`UsedState`)    fp8_state_at_replay
positions in the memory pool, members and addresses     ``Replay.record`` (`Record`)          replay_contract_record
sample arguments                                        `SampleArguments`                     replay_arguments
outputs without gradients                               `mark_outputs`                        replay_arguments
tensors of recipe states                                `RecipeStates`                        state_after_evaluation
skip flags of modules                                   ``Replay.skip_flags`` (`GraphFlags`)  first_microbatches
cached FP8 weights, and transposes                      `CachedWeights`, `PrimaryWeights`     fp8_weights
random number generators                                `Generators`                          rng_states_at_replay
updates of scales in a recomputation                    `ScaleUpdates`                        recompute_in_graphs
weights that the backward marks                         `record_marks`                        grad_added_mark
gradients of delayed wgrads                             `DelayedGrad`                         delayed_wgrad_delivery
======================================================  ====================================  =======================

Replays change other objects: a `Call` for each forward, `Preconditions` for each callable, and a `MemoryPool` for all
callables that share memory. `GraphFlags` also notes the last flags, and `RecipeStates` the number of replaced states.

Some fixes edit TE's own code around these phases: the flag of the first FP8 module (`backward-amax-reduction`), the
condition for filling the skip flag (`stale-fp8-weights`), the list of outputs (`none-outputs`), the copies of parameter
gradients (`param-grad-lifetime`, `fused-dummy-copies`), and the hooks after `backward_dw` (`backward-dw-hooks`,
`wgrad-hook-order`).
"""

from bisect import bisect, insort
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

ORDER: dict[str, tuple[str, ...]] = {
    "forward check": (
        "compare arguments",
        "require first microbatch",
        "require recipe",
        "refuse own autocasts",
        "require contract",
        "require copied scales",
    ),
    "forward prepare": (
        "note leaf inputs",
        "note first module",
        "resume recipe states",  # before these states are registered, and before weights are quantized with them
        "register states of TE",
        "register states of capture",  # after TE's states, because TE does not know attention's own recipe
        "use copied scales",  # after the registrations set the recipes, because TE copies only delayed-scaling states
        "recompute transposes",
        "use own skip flag",
        "fill flags of modules",  # before the cached weights, because the flags decide whether the graph reuses them
        "refresh cached weights",
        "lend generators",
    ),
    "forward deliver": (
        "update scales",
        "take first module",
        "note replay",  # before the copies, because this step determines whether outputs are copied
        "copy outputs",
        "mark outputs without gradients",  # after the copies, because autograd has to know the returned tensors
    ),
    "backward check": (
        "require captured backward",
        "require first microbatch",
        "require contract",
        "require recipe states",
    ),
    "backward prepare": ("fill skip flag", "take scale updates", "lend generators"),
    "backward deliver": (
        "note replay",  # before the copies, because this step determines which gradients are copied
        "update scales",
        "mark weights",
        "copy input gradients",
    ),
    "wgrad check": ("require contract",),
    "wgrad prepare": ("lend generators",),
    "wgrad deliver": ("note replay", "assign gradients"),
}
"""The steps of each phase, in the order in which they run.

A disabled fix adds no step, and neither does a fix that has nothing to do for a callable. A comment gives the reason
for each order that is necessary. Swapping other steps changes at most which check raises first.
"""


class Call:
    """One replay of a forward. The backward of this forward finds the call in ``ctx.call``."""

    resumed: Sequence[Any] = ()  # pairs of a module and the graph's recipe states, which become the module's states
    copied_inputs: Sequence[int] = ()  # the indexes of inputs whose gradients are returned as copies
    was_first_module = False  # True if no module took the autocast's flag of the first FP8 module before this forward
    updates_backward = False  # True if a step of its backward, instead of TE, updates the scales of all backwards
    in_backward = False  # True if the forward was run in a backward
    has_hooks = False  # True if the forward was run under the hooks of a checkpoint
    in_checkpoint = False  # True if the forward was run in a checkpoint
    copies_outputs = False  # True if the outputs are returned as copies
    time = 0  # the time of the replay, counted in replays of its memory pool

    def __init__(
        self,
        skip_update: bool | None,
        inputs: Sequence[Any],
        specs: tuple[Any, ...],
        keywords: Mapping[str, Any],
        register_states: Callable[[], None] | None,
    ) -> None:
        self.skip_update = skip_update  # True if a graph that caches FP8 weights reuses them, None if it caches none
        self.reuses_weights = skip_update  # a step replaces this value if the graph has flags of its own
        self.inputs = inputs  # the leaves of the user's arguments, dropped after the replay
        self.specs = specs  # the structures of the arguments
        self.keywords = keywords  # all keyword arguments, dropped after the replay
        self.register_states = register_states  # TE's registration of FP8 states, or None outside of an FP8 autocast
        self.takes_grads = torch.is_grad_enabled()


class Replay:
    """The facts about one callable that several modules read, and the steps of its replays.

    ``name`` is the callable's name in errors. Facts that only one fix reads are in the object that adds its steps.
    """

    name = "This graphed callable"
    fp8_state: Any = None
    skip_flags: Any = None
    record: Any = None

    def __init__(self) -> None:
        self._steps: dict[str, list[Callable[..., Any]]] = {phase: [] for phase in ORDER}
        self._ranks: dict[str, list[int]] = {phase: [] for phase in ORDER}
        self.add("forward prepare", "register states of TE", _register)

    def add(self, phase: str, name: str, step: Callable[..., Any]) -> None:
        """Add ``step`` to ``phase``, at the place that ``name`` has in `ORDER`."""
        rank, ranks = ORDER[phase].index(name), self._ranks[phase]
        self._steps[phase].insert(bisect(ranks, rank), step)
        insort(ranks, rank)

    def _replay(self, phase: str, context: Any, replay: Callable[..., Any], *arguments: Any) -> Any:
        """Run the steps of ``phase``, then TE's ``replay``. Restore the borrowed state, and return TE's result."""
        returns = []
        try:
            for step in self._steps[phase]:
                if (return_state := step(context)) is not None:
                    returns.append(return_state)
            return replay(*arguments)
        finally:
            for return_state in reversed(returns):
                return_state()

    def check(self, **facts: Any) -> Call:
        """Return the `Call` of a forward, created from ``facts``. A check raises an error if it refuses the call."""
        call = Call(**facts)
        for step in self._steps["forward check"]:
            step(call)
        return call

    def surround_forward(self, function: Any) -> None:
        """Make TE's autograd function run the steps before and after its forward.

        The forward then takes a `Call` in place of TE's first argument, ``skip_fp8_weight_update``.
        """
        te_forward = function.forward

        def forward(ctx: Any, call: Call, *arguments: Any) -> Any:
            ctx.call = call
            outputs = self._replay("forward prepare", call, te_forward, ctx, call.skip_update, *arguments)
            for step in self._steps["forward deliver"]:
                outputs = step(ctx, outputs)
            call.inputs = ()
            call.keywords = {}
            return outputs

        function.forward = staticmethod(forward)

    def surround_backward(self, function: Any) -> None:
        """Make TE's autograd function run the steps before and after its backward."""
        te_backward = function.backward

        def backward(ctx: Any, *gradients: Any) -> Any:
            for step in self._steps["backward check"]:
                step(ctx)
            grad_inputs = self._replay("backward prepare", ctx, te_backward, ctx, *gradients)
            for step in self._steps["backward deliver"]:
                grad_inputs = step(ctx, grad_inputs)
            return grad_inputs

        function.backward = staticmethod(backward)

    def wgrad(self, replay: Callable[[], None]) -> None:
        """Run TE's ``replay`` of the wgrad and the steps around it."""
        for step in self._steps["wgrad check"]:
            step()
        self._replay("wgrad prepare", None, replay)
        for step in self._steps["wgrad deliver"]:
            step()

    def reset(self) -> None:
        """Drop all facts and all steps before TE resets the graphs. Later replays raise an error."""
        self.fp8_state = self.skip_flags = self.record = None
        self._steps = {phase: [self._refuse] if phase.endswith("check") else [] for phase in ORDER}

    def _refuse(self, *_: Any) -> None:
        raise RuntimeError(f"{self.name} was reset, so its graphs can no longer be replayed. Capture again.")


def _register(call: Call) -> None:
    if call.register_states is not None:
        call.register_states()


class Replays(list[Replay]):
    """The `Replay` of each callable in one capture, at the callable's index in TE's lists of ``graphs``."""

    def __init__(self, *graphs: Sequence[Any]) -> None:
        super().__init__(Replay() for _ in graphs[0])
        self._graphs = graphs

    def of(self, graph: Any) -> Replay:
        """Return the `Replay` of the callable whose forward, dgrad or wgrad graph is ``graph``."""
        return next(self[graphs.index(graph)] for graphs in self._graphs if graph in graphs)
