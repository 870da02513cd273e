"""A decoder-only transformer whose feed-forwards are mixtures of experts: each token passes through a few of many.

Attention, norms and rotary positions are `transformer`'s. A router scores the experts for each token; the `top_k` best
compute it, and nothing is dropped. Like `transformer` it needs nothing of allranks, so that it stands for any module
that a user brings. Two conventions let allranks spread it (docs/how-to/experts.md): `Experts.forward(tokens,
tokens_per_expert)` over stacked parameters, and `Router.update_balance()` beside the buffer `tokens_per_expert`.

Sources: the sparsely-gated mixture of experts (arXiv 1701.06538); dropless experts (arXiv 2211.15841); sigmoid scores
with weights over the chosen, and balance by a bias instead of a loss (arXiv 2408.15664, 2412.19437).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from allranks.models.transformer import INIT_STD, Attention, Block, Decoder

BALANCE_RATE = 1e-3  # arXiv 2408.15664, section 4.3
ALIGNED_BYTES = 16  # what a grouped product wants its rows to be multiples of

# torch 2.13 has it under a public name.
_grouped_mm: Any = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def can_group(tokens: torch.Tensor, stacked: torch.Tensor) -> bool:
    """Whether torch multiplies `tokens` [n, in] with `stacked` [experts, in, out] in one call."""
    if _grouped_mm is None or not len(tokens) or tokens.dtype is not stacked.dtype:
        return False
    # Memory itself is; a view may begin somewhere inside.
    lengths = (*stacked.shape[1:], tokens.storage_offset(), stacked.storage_offset())
    aligned = all(length * stacked.element_size() % ALIGNED_BYTES == 0 for length in lengths)
    # What torch.compile knows of it is bfloat16's.
    others = () if torch.compiler.is_compiling() else (torch.float32, torch.float16)
    return aligned and tokens.dtype in (torch.bfloat16, *others)


def leaves_rest(device: torch.device) -> bool:
    """Whether grouped products give an expert without tokens a gradient of whatever was in their registers.

    On Blackwell: pytorch issue 172439, NVIDIA/cutlass issue 2674.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


def multiply(tokens: torch.Tensor, stacked: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
    """Each expert's product of its own tokens with its own matrix, in autocast's type where that is on.

    Args:
        tokens: [n, in], those of the first expert first.
        stacked: [experts, in, out].
        tokens_per_expert: [experts], integers; their sum is n.

    Returns:
        [n, out].
    """
    kind = tokens.device.type
    if torch.is_autocast_enabled(kind) and tokens.dtype is not torch.float64:
        lower = torch.get_autocast_dtype(kind)
        tokens, stacked = tokens.to(lower), stacked.to(lower)
    if not can_group(tokens, stacked):
        parts = tokens.split(tokens_per_expert.tolist())
        return torch.cat([part @ matrix for part, matrix in zip(parts, stacked.unbind(), strict=True)])
    ends = tokens_per_expert.cumsum(0).to(torch.int32)
    if stacked.requires_grad and leaves_rest(stacked.device):
        stacked = stacked.view_as(stacked)
        used = (tokens_per_expert > 0).view(-1, 1, 1)
        # No product: what is there may be no number.
        stacked.register_hook(lambda gradient: torch.where(used, gradient, 0.0))
    found: torch.Tensor = _grouped_mm(tokens, stacked, offs=ends)
    if found.requires_grad:
        # Its backward refuses gradients without strides, those of a sum for one.
        found.register_hook(lambda gradient: gradient.contiguous())
    return found


class Experts(nn.Module):
    """`num_experts` SwiGLU feed-forwards, in three stacked parameters.

    It computes with as many experts as its parameters hold, whatever `num_experts` says: expert parallelism gives each
    process some of them, and their tokens.
    """

    def __init__(self, num_experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = nn.Parameter(torch.empty(num_experts, hidden, ffn))
        self.up = nn.Parameter(torch.empty(num_experts, hidden, ffn))
        self.down = nn.Parameter(torch.empty(num_experts, ffn, hidden))
        for stacked in (self.gate, self.up, self.down):
            nn.init.normal_(stacked, std=INIT_STD)

    def forward(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> the same: the first `tokens_per_expert[0]` rows through expert 0, and so on."""
        gated = functional.silu(multiply(tokens, self.gate, tokens_per_expert))
        return multiply(gated * multiply(tokens, self.up, tokens_per_expert), self.down, tokens_per_expert)


class Router(nn.Module):
    """Which `top_k` experts each token goes to, and with what weights.

    The best are those of the largest sigmoid score plus bias, of equal ones the first; the weights are the scores
    without the bias, divided by their sum (with a `top_k` of 1 always 1, so that the router learns nothing). The bias
    has no gradient: after each optimizer step it grows by `rate` where an expert got fewer tokens than the mean, and
    shrinks where it got more.

    Attributes:
        bias: [num_experts].
        tokens_per_expert: [num_experts], how many tokens each was chosen for since the last `update_balance`.
    """

    bias: torch.Tensor
    tokens_per_expert: torch.Tensor

    def __init__(self, hidden: int, num_experts: int, top_k: int, rate: float = BALANCE_RATE) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k({top_k}) must be 1 to num_experts({num_experts})")
        self.top_k = top_k
        self.rate = rate
        self.score = nn.Linear(hidden, num_experts, bias=False)
        self.register_buffer("bias", torch.zeros(num_experts))
        counts = torch.zeros(num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, hidden] -> the experts [n, top_k] of each token, the best first, and their weights [n, top_k]."""
        # In float32 at least: autocast, or a weight that was rounded to be gathered, would make one of scores that lie
        # close together.
        weight = self.score.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            if weight.dtype is wide:
                logits = self.score(tokens.to(wide))
            else:
                logits = functional.linear(tokens.to(wide), weight.to(wide))
            scores = logits.sigmoid()
        # A stable sort: which of equal scores topk takes may depend on how many tokens there are.
        ranked = (scores.detach() + self.bias).sort(dim=-1, descending=True, stable=True).indices
        chosen = ranked[:, : self.top_k]
        weights = scores.gather(1, chosen)
        tiny = torch.finfo(weights.dtype).tiny
        return chosen, weights / weights.sum(-1, keepdim=True).clamp(min=tiny)

    @torch.no_grad()
    def update_balance(self) -> None:
        """Once after each optimizer step: move the bias, and count anew. Nothing moves where nothing was counted."""
        # Of whole numbers, so that no rounding decides.
        fewer = (self.tokens_per_expert.sum() - self.tokens_per_expert * len(self.bias)).sign()
        self.bias += self.rate * fewer.to(self.bias.dtype)
        self.tokens_per_expert.zero_()


class MixtureOfExperts(nn.Module):
    """A feed-forward in which each token passes through `top_k` of `num_experts` experts: [..., hidden] -> the same."""

    def __init__(self, hidden: int, ffn: int, num_experts: int, top_k: int, rate: float = BALANCE_RATE) -> None:
        super().__init__()
        self.router = Router(hidden, num_experts, top_k, rate)
        self.experts = Experts(num_experts, hidden, ffn)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Sort a copy of each token for each of its experts, let them compute, and add up by the weights."""
        tokens = value.flatten(0, -2)
        chosen, weights = self.router(tokens)
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(len(self.router.bias), device=experts.device)
        ends = torch.searchsorted(experts, numbers, right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        if self.training:
            self.router.tokens_per_expert += counts
        copies = tokens.repeat_interleave(chosen.shape[1], 0)
        computed = self.experts(copies[order], counts)[order.argsort()]
        mixed: torch.Tensor = (computed.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)
        return mixed.to(value.dtype).view(value.shape)


class MoETransformer(Decoder):
    """Tokens [batch, seq] (integers below `vocab_size`, seq at most `max_seq`) -> logits [batch, seq, vocab_size].

    In a training loop of one's own, `update_balance()` is called after each optimizer step; allranks does it itself.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        num_layers: number of blocks.
        hidden: width of the residual stream; a multiple of 2 * num_heads where `head_dim` is not given.
        num_heads: attention heads of a block.
        num_experts: experts of a block.
        top_k: of them, those that a token passes through.
        ffn: width of one expert; by default as wide as hidden.
        max_seq: the longest sequence.
        tied: whether the output layer is the embedding's own matrix.
        num_kv_heads: heads of keys and values, a divisor of num_heads; by default as many.
        rate: by how much a router's bias moves after a step.
        head_dim: channels of a head, even; by default hidden / num_heads.
        chunk: positions whose logits are held at once where forward is given `targets`; by default it takes none.
    """

    # How tensor parallelism cuts it: attention and the embedding; every process of a tp group computes the experts.
    tensor_plan: ClassVar[Mapping[str, str]] = {
        "embedding": "vocab",
        "layers.*.*_norm": "sequence",
        "layers.*.attention.query": "colwise",
        "layers.*.attention.key": "colwise",
        "layers.*.attention.value": "colwise",
        "layers.*.attention.out": "rowwise",
        "layers.*.feed_forward": "replicate",
        "norm": "sequence",
        "output": "vocab",
    }
    residual_ends = ("attention.out.weight", "experts.down")

    def __init__(
        self,
        vocab_size: int,
        num_layers: int,
        hidden: int,
        num_heads: int,
        num_experts: int,
        top_k: int,
        ffn: int | None = None,
        max_seq: int = 1024,
        tied: bool = True,
        num_kv_heads: int | None = None,
        rate: float = BALANCE_RATE,
        head_dim: int | None = None,
        chunk: int | None = None,
    ) -> None:
        width = hidden if ffn is None else ffn
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        blocks = (
            Block(
                hidden,
                Attention(hidden, num_heads, kv_heads, max_seq, head_dim),
                MixtureOfExperts(hidden, width, num_experts, top_k, rate),
            )
            for _ in range(num_layers)
        )
        super().__init__(vocab_size, hidden, blocks, max_seq=max_seq, tied=tied, chunk=chunk)

    def update_balance(self) -> None:
        """That of every router: once after each optimizer step."""
        for member in self.modules():
            if isinstance(member, MixtureOfExperts):
                member.router.update_balance()
