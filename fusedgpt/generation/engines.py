"""Prepare a model to generate on this machine, with a dtype for each phase and a decode step that may be compiled.

Prefill reads a whole prompt and is bound by compute. Decode reads every weight for each token and is bound by memory.
So the fastest dtype for one may be slow for the other: on 2 cores of an AMD EPYC, a prompt of 32 tokens took GPT-2 124M
0.07 s in float32, 0.02 s in bfloat16 and 0.14 s in float16; a token took 33, 14 and 9 ms.

B samples, T prompt ids, nkv heads of keys and values, hs head size.
"""

import copy
import statistics

import torch
from torch import Tensor, nn

from fusedgpt.attention.functions import as_rows, without_cudnn
from fusedgpt.attention.table import KERNELS
from fusedgpt.generation.generate import LayerCache, capacity, empty, new_cache
from fusedgpt.machine import timing, turns
from fusedgpt.machine.device import cpu_multiplies_bfloat16, dtype_name, resolve_dtype

PRECISE_FIRST = (torch.float32, torch.float16, torch.bfloat16)
WORTH = 0.95  # take a coarser dtype only below this share of the time
ENOUGH_WEIGHTS = 2**25  # time decode with so many weights: 64 MiB in 16 bits, more than most CPUs' caches hold
ROWS = 64  # time prefill with so many tokens: more would not change which dtype wins, and float16 may be slow
SECONDS = 0.3  # of a race of dtypes


class Engine:
    """A model for generate.new_tokens that runs in one dtype on several ids and in another on a single id.

    It only generates. `dtypes` are those of prefill and decode, `chosen` says why, if they were measured. Pass `cache`
    to every call of new_tokens, because a CUDA graph is bound to its buffers.
    """

    def __init__(self, prefill: nn.Module, decode: nn.Module, dtypes: tuple[torch.dtype, torch.dtype], chosen: str):
        self.prefill, self.decode, self.dtypes, self.chosen = prefill, decode, dtypes, chosen
        self.config, self.cache = prefill.config, new_cache(prefill.config)

    def __call__(self, idx: Tensor, cache: list[LayerCache]) -> tuple[Tensor, None]:
        """Logits (B, 1, V) after `idx` (B, T), as from the model's forward."""
        if idx.size(1) > 1 or cache[0].length == 0:
            return self.prefill(idx, cache=cache)
        return self.decode(idx, cache=cache)


@torch.no_grad()
def prepare(
    model: nn.Module,
    device: torch.device,
    dtype: str | tuple[torch.dtype, torch.dtype] = "auto",
    batch_size: int = 1,
    prompt_length: int = 32,
    new_tokens: int = 0,
    compiled: bool = False,
) -> Engine:
    """Make an Engine of `model` (a GPT) for `device`. `model` itself is not changed, and may be freed afterwards.

    dtype: 'auto' takes `fastest_dtypes` on a CPU, for `batch_size` prompts of `prompt_length`; on other devices
    resolve_dtype decides. Any other name holds for both phases; a pair of dtypes is for the prompt, and for each token.
    new_tokens: that will be drawn after a prompt. The cache has room for so many at once; it grows for more.
    compiled: torch.compile the decode step. On a GPU it becomes one CUDA graph if the model's attention takes a mask.
    """
    chosen = ""
    if dtype == "auto" and device.type == "cpu":
        dtype, chosen = fastest_dtypes(model, batch_size, prompt_length)
    elif isinstance(dtype, str):
        dtype = (resolve_dtype(dtype, device),) * 2
    copies = {each: converted(model, device, each).eval() for each in dtype}
    first, second = (copies[each] for each in dtype)
    engine = Engine(first, second, dtype, chosen)
    attention = KERNELS.get(model.config.attention)  # None: a user's own
    if compiled and device.type == "cuda" and attention and attention.takes_mask:
        engine.decode = GraphedStep(second)
    elif compiled:
        # dynamic: the cache grows. A step of GPT-2 124M took 9.1 ms eager, 7.7 compiled, 8.7 without cpp_wrapper
        options = {"cpp_wrapper": True} if device.type == "cpu" else None
        engine.decode = torch.compile(second, dynamic=True, options=options)
    empty(engine.cache, capacity(model.config, prompt_length + new_tokens))
    if compiled:
        _compile_now(engine, torch.zeros(batch_size, 1, dtype=torch.long, device=device))
    return engine


def _compile_now(engine, idx):
    """Compile, so that no token waits. The first tokens, and the last for which the cache has room, have own graphs."""
    most = engine.cache[0].capacity
    for length in sorted({0, 1, 2, most - 2, most - 1} & set(range(most))):
        for layer in engine.cache:
            layer.length = length
        engine(idx, engine.cache)
    empty(engine.cache)


def converted(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A copy of `module` with weights on `device` in `dtype`. It shares weights that need no change; ties stay."""
    # keep requires_grad, or F.linear sends a slice through bmm, which copies the head's 77 MB (0.1 s, PyTorch 2.13)
    weights = {id(p): nn.Parameter(p.detach().to(device, dtype)) for p in module.parameters()}
    return copy.deepcopy(module, weights)  # `weights` is the memo: deepcopy takes these, and copies none


@torch.no_grad()
def fastest_dtypes(model: nn.Module, B: int, T: int) -> tuple[tuple[torch.dtype, torch.dtype], str]:
    """The dtypes of prefill and decode that are fastest on this CPU for B prompts of T ids, and the times in words.

    The decode step is timed without the compiler.
    """
    layers = model.transformer.h
    several = min(len(layers), max(1, ENOUGH_WEIGHTS // sum(p.numel() for p in layers[0].parameters())))
    decode = _milliseconds(_shortened(model, several), (B, 1), PRECISE_FIRST)
    if _first_worth_it(decode) == torch.float16 and not _finite(converted(model, torch.device("cpu"), torch.float16)):
        del decode[torch.float16]
    one = _first_worth_it(decode)
    words = f"tokens after it in {_in_words(decode)}"
    if not cpu_multiplies_bfloat16():  # whatever a clock says on a busy machine
        return (torch.float32, one), f"prompt in float32; {words}"
    dtypes = (torch.float32, torch.bfloat16)  # no CPU computes products faster in float16
    prefill = _milliseconds(_shortened(model, 1), (B, min(T, model.config.block_size, max(1, ROWS // B))), dtypes)
    return (_first_worth_it(prefill), one), f"prompt in {_in_words(prefill)}; {words}"


def _finite(model):
    """Whether all logits after an id are: the residual stream of some models overflows float16, above 65504."""
    logits, _ = model.eval()(torch.zeros(1, 1, dtype=torch.long), cache=new_cache(model.config, 1))
    return bool(logits[..., : model.config.vocab_size].isfinite().all())


def _in_words(times):
    each = ", ".join(f"{dtype_name(dtype)} {times[dtype]:.2f}" for dtype in PRECISE_FIRST if dtype in times)
    return f"{dtype_name(_first_worth_it(times))} (ms of layers: {each})"


def _shortened(model, layers):
    """`model` with only its first `layers` layers, and without the output layer. It shares the weights."""
    short = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    short.transformer.h, short.lm_head = short.transformer.h[:layers], nn.Identity()
    return short


def _first_worth_it(times):
    best, *coarser = (dtype for dtype in PRECISE_FIRST if dtype in times)
    for dtype in coarser:
        if times[dtype] < WORTH * times[best]:
            best = dtype
    return best


def _milliseconds(model, shape, dtypes):
    """{dtype: ms of `model` on (B, T) tokens}, from the fastest on, of dtypes that take turns (machine/turns.py)."""
    cpu, idx = torch.device("cpu"), torch.zeros(shape, dtype=torch.long)

    def turn(dtype):
        one = converted(model, cpu, dtype).eval()
        return timing.Steps(lambda: one(idx, cache=new_cache(model.config, shape[1])), cpu, warmup=0)

    laps = turns.race({dtype: turn(dtype) for dtype in dtypes}, SECONDS)
    return {dtype: statistics.median(laps.of(dtype)) for dtype in laps.by_speed()}


class StaticLayer:
    """A view of a LayerCache in shapes that never change. A tensor (1,) holds the next position."""

    def __init__(self, layer: LayerCache, position: Tensor):
        self.k, self.v, self.ids, self.position, self.length = layer.k, layer.v, layer.ids, position, 0

    def positions(self, T: int, device: torch.device) -> Tensor:
        """The position (1,) of the next id. T is 1."""
        return self.position

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, nkv, 1, hs); return the whole buffers, (B, nkv, capacity, hs), filled or not."""
        self.k.index_copy_(2, self.position, k.to(self.k.dtype))
        self.v.index_copy_(2, self.position, v.to(self.v.dtype))
        return self.k, self.v

    def extend_ids(self, idx: Tensor) -> Tensor:
        """Write idx (B, 1); return all of the buffer, (B, capacity), filled or not."""
        return self.ids.index_copy_(1, self.position, idx)


class StaticStep:
    """A decode step with static shapes: attention over the whole buffers, with a mask over what is not filled."""

    def __init__(self, model: nn.Module):
        self.model = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # the same weights
        for block in self.model.transformer.h:
            block.attn.attend = self._attend
        self.buffers = []

    def __call__(self, idx: Tensor, cache: list[LayerCache]) -> tuple[Tensor, None]:
        """Logits (B, 1, V) after one more id of each sample, `idx` (B, 1). The cache must have room for it."""
        buffers = [x for layer in cache for x in (layer.k, layer.v, layer.ids)]
        if len(buffers) != len(self.buffers) or any(a is not b for a, b in zip(buffers, self.buffers)):
            self.buffers = buffers
            self.idx, self.position = idx.clone(), torch.tensor([cache[0].length], device=idx.device)
            self.static = [StaticLayer(layer, self.position) for layer in cache]
            self.run = self.captured()
        self.idx.copy_(idx)
        self.position.fill_(cache[0].length)
        for layer in cache:
            layer.length += 1
        return self.run(), None

    def captured(self):
        return self._logits

    def _logits(self):
        return self.model(self.idx, cache=self.static)[0]

    def _attend(self, q, k, v, dropout_p, documents=None, window=None):
        every = torch.arange(k.size(2), device=k.device)
        seen = (every <= self.position)[None]
        if window is not None:
            seen = seen & (every > self.position - window)
        if documents is not None:
            seen = (seen & (documents == documents.index_select(1, self.position)))[:, None, None]
        return without_cudnn(as_rows, q, k, v, seen)  # cuDNN would be slow for one query


class GraphedStep(StaticStep):
    """A StaticStep, compiled and replayed as one CUDA graph. The GPU waits for Python once a token, not 200 times."""

    def captured(self):
        """The function that replays the graph. Warm-up and capture only write keys that the first replay overwrites."""
        step, graph, side = torch.compile(self._logits, dynamic=False), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            logits = step()

        def run():
            graph.replay()
            return logits

        return run
