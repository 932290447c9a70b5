"""Rows -> minibatches -> packed micro-batches in which no shared beginning is calculated twice.

The rows of a group share their prompt, perhaps their seed, perhaps the first tokens of the answer. A micro-batch is the
forest of their token tries: every distinct position is one *node*, calculated once. Linear layers then see no padding
at all; attention runs in a few rectangular *blocks* of rows of similar length (``Block``), because scaled-dot-product
attention wants rectangles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

QUERY_CHUNK = 256  # longer query runs are split, so that causal attention does not calculate its upper triangle
_FREE_AREA = 1 << 16  # padded attention area per block that costs less than another call


@dataclass(slots=True)
class Block:
    """One rectangle of attention: R runs of up to Tq queries over up to Tk keys.

    queries [R * Tq], keys [R * Tk]: node indices (padding repeats node 0 of the run). depth [R, Tq]: each query's
    position, -1 for padding; a query sees keys j <= depth (and j > depth - window).
    """

    queries: Tensor
    keys: Tensor
    depth: Tensor
    shape: tuple[int, int, int]
    masks: dict[tuple, Tensor] = field(default_factory=dict)

    def mask(self, dtype: torch.dtype, window: int | None) -> Tensor:
        """Additive mask [R, 1, Tq, Tk]; made once and shared by the layers."""
        key = (dtype, window)
        if key not in self.masks:
            depth = self.depth.clamp(min=0)[:, :, None]
            j = torch.arange(self.shape[2], device=self.depth.device)
            see = j <= depth
            if window is not None:
                see &= j > depth - window
            self.masks[key] = torch.zeros(see.shape, dtype=dtype, device=see.device).masked_fill_(~see, float("-inf"))[
                :, None
            ]
        return self.masks[key]


@dataclass(slots=True)
class Packed:
    """A micro-batch. N nodes, P (node, next token) pairs, M response tokens of its rows.

    ids, positions [N]: model input. pair_node, pair_target [P], inverse_temperature [P] float32: what the head calculates.
    token_pair [M]: the pair of each response token. tokens [M]: its place in the iteration's flat token tensors.
    order [N]: place of each node's attention output in the concatenated blocks (of its hidden state in the padded
    rectangle). padded: [R, T] node indices and
    lengths [R] for models that need plain padded batches, None otherwise.
    """

    ids: Tensor
    positions: Tensor
    pair_node: Tensor
    pair_target: Tensor
    inverse_temperature: Tensor
    token_pair: Tensor
    tokens: Tensor
    rows: list[int]
    blocks: list[Block]
    order: Tensor
    row_tokens: int
    padded: tuple[Tensor, Tensor] | None = None

    def to(self, device: torch.device) -> Packed:
        """The same micro-batch on another device."""
        if device.type == "cpu":
            return self
        move = lambda t: t.to(device, non_blocking=True)  # noqa: E731
        blocks = [Block(move(b.queries), move(b.keys), move(b.depth), b.shape) for b in self.blocks]
        padded = None if self.padded is None else (move(self.padded[0]), move(self.padded[1]))
        names = ("ids", "positions", "pair_node", "pair_target", "inverse_temperature", "token_pair", "order")
        return replace(self, blocks=blocks, padded=padded, **{n: move(getattr(self, n)) for n in names})


@dataclass(slots=True)
class _Trie:
    """Token trie of some rows of one group: rows in lexicographic order, new nodes of row i numbered after those before."""

    rows: list[int]
    ids: list[np.ndarray]
    starts: list[int]
    shared: list[int]  # leading input tokens that row i has in common with row i - 1
    agree: list[int]  # leading tokens in common, the last one included: pairs are shared up to here

    @property
    def nodes(self) -> int:
        return sum(len(i) - 1 - s for i, s in zip(self.ids, self.shared, strict=True))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _trie(rows: Sequence[int], prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], share: bool) -> _Trie:
    full = {r: np.concatenate([prompts[r], responses[r]]) for r in rows}
    order = sorted(rows, key=lambda r: (len(prompts[r]), full[r].tolist(), r))
    ids, starts = [full[r] for r in order], [len(prompts[r]) for r in order]
    shared, agree = [0][: len(order)], [0][: len(order)]
    for i in range(1, len(order)):
        same = _common(ids[i - 1], ids[i]) if share and starts[i] == starts[i - 1] else 0
        agree.append(same)
        shared.append(min(same, len(ids[i]) - 1, len(ids[i - 1]) - 1))
    return _Trie(list(order), ids, starts, shared, agree)


def pack(
    groups: Sequence[Sequence[int]],
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    temperatures: Sequence[float],
    offsets: Sequence[int] | np.ndarray,
    *,
    share: bool = True,
    padded: bool = False,
) -> Packed:
    """One micro-batch of whole rows.

    groups: row numbers, those that may share a beginning together. prompts, responses: token ids of all rows of the
    iteration (prompts not empty). offsets[r]: place of row r's first response token in the flat token tensors.
    """
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    pair_node: list[np.ndarray] = []
    pair_target: list[np.ndarray] = []
    pair_temperature: list[np.ndarray] = []
    token_pair: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    rows: list[int] = []
    runs: list[tuple[np.ndarray, np.ndarray]] = []  # (query nodes, path of nodes that ends with the queries)
    paths: list[np.ndarray] = []
    n = p = 0
    for group in groups:
        same_temperature = len({temperatures[r] for r in group}) <= 1
        trie = _trie(
            [r for r in group if len(responses[r])], prompts, responses, share and same_temperature and not padded
        )
        path = pairs = np.zeros(0, dtype=np.int64)
        common = min(trie.shared[1:], default=0)
        for i, (r, seq, start) in enumerate(zip(trie.rows, trie.ids, trie.starts, strict=True)):
            s, m = trie.shared[i], len(seq) - 1
            path = np.concatenate([path[:s], np.arange(n, n + m - s)])
            n += m - s
            ids.append(seq[s:m])
            positions.append(np.arange(s, m))
            # pairs[t] is the pair of token t of the row; prompt tokens have none (-1)
            first = max(trie.agree[i], start) if s else start
            head = pairs[:first] if len(pairs) >= first and s else np.full(start, -1, dtype=np.int64)
            new = len(seq) - first
            pairs = np.concatenate([head, np.arange(p, p + new)])
            p += new
            pair_node.append(path[first - 1 : m])
            pair_target.append(seq[first:])
            pair_temperature.append(np.full(new, 1.0 / temperatures[r], dtype=np.float32))
            token_pair.append(pairs[start:])
            tokens.append(np.arange(offsets[r], offsets[r] + len(seq) - start))
            rows.append(r)
            paths.append(path)
            cuts = [s, *([common] if s < common < m else []), m]
            for a, b in pairwise(cuts):
                for c in range(a, b, QUERY_CHUNK):
                    e = min(c + QUERY_CHUNK, b)
                    runs.append((path[c:e], path[:e]))

    def flat(parts: list[np.ndarray], dtype: type = np.int64) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype))

    blocks, order = ([], np.zeros(0, dtype=np.int64)) if padded else _blocks(runs, n)
    rectangle = None
    if padded:
        longest = max((len(x) for x in paths), default=0)
        index = np.stack([np.pad(x, (0, longest - len(x)), mode="edge") for x in paths]) if paths else np.zeros((0, 0))
        rectangle = (torch.from_numpy(index.astype(np.int64)), torch.tensor([len(x) for x in paths]))
        order = np.concatenate(
            [r * longest + np.arange(len(x)) for r, x in enumerate(paths)] or [np.zeros(0, np.int64)]
        )
    return Packed(
        ids=flat(ids), positions=flat(positions), pair_node=flat(pair_node), pair_target=flat(pair_target),
        inverse_temperature=flat(pair_temperature, np.float32), token_pair=flat(token_pair), tokens=flat(tokens),
        rows=rows, blocks=blocks, order=torch.from_numpy(order), row_tokens=sum(len(x) for x in paths), padded=rectangle,
    )  # fmt: skip


def _blocks(runs: list[tuple[np.ndarray, np.ndarray]], nodes: int) -> tuple[list[Block], np.ndarray]:
    """Rectangles of runs of similar size, and where each node's output lies in their concatenation."""
    runs = sorted(runs, key=lambda run: (len(run[1]), len(run[0])))
    order = np.zeros(nodes, dtype=np.int64)
    blocks: list[Block] = []
    base = i = 0
    while i < len(runs):
        tq, tk, area, j = len(runs[i][0]), len(runs[i][1]), 0, i
        while j < len(runs):
            wide, deep = max(tq, len(runs[j][0])), len(runs[j][1])
            more = area + len(runs[j][0]) * len(runs[j][1])
            if (j + 1 - i) * wide * deep > 1.15 * more + _FREE_AREA:
                break
            tq, tk, area, j = wide, deep, more, j + 1
        count = j - i
        queries = np.zeros((count, tq), dtype=np.int64)
        keys = np.zeros((count, tk), dtype=np.int64)
        depth = np.full((count, tq), -1, dtype=np.int64)
        for r, (q, k) in enumerate(runs[i:j]):
            queries[r, : len(q)], queries[r, len(q) :] = q, q[0]
            keys[r, : len(k)], keys[r, len(k) :] = k, k[0]
            depth[r, : len(q)] = np.arange(len(k) - len(q), len(k))
            order[q] = base + r * tq + np.arange(len(q))
        blocks.append(
            Block(
                torch.from_numpy(queries.ravel()),
                torch.from_numpy(keys.ravel()),
                torch.from_numpy(depth),
                (count, tq, tk),
            )
        )
        base += count * tq
        i = j
    return blocks, order


def micro_batches(
    groups: Sequence[Sequence[int]],
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    budget: int,
    *,
    share: bool = True,
    least: int = 1,
) -> list[list[list[int]]]:
    """Groups of rows packed into micro-batches of at most ``budget`` nodes each (a longer single row is its own).

    least: aim at this many micro-batches or more, one for each rank.

    Groups are taken from the longest to the shortest, so that a micro-batch holds rows of similar length; a group that
    does not fit is split between rows. Deterministic.
    """
    pieces: list[tuple[int, int, list[int]]] = []  # nodes, longest row, rows
    tries = [_trie([r for r in group if len(responses[r])], prompts, responses, share) for group in groups]
    if least > 1:
        budget = min(budget, -(-sum(t.nodes for t in tries) // least))
    for trie in tries:
        piece: list[int] = []
        size = longest = 0
        for i, r in enumerate(trie.rows):
            whole = len(trie.ids[i]) - 1
            new = whole - (trie.shared[i] if piece else 0)
            if piece and size + new > budget:
                pieces.append((size, longest, piece))
                piece, size, longest, new = [], 0, 0, whole
            piece.append(r)
            size, longest = size + new, max(longest, whole)
        if piece:
            pieces.append((size, longest, piece))
    pieces.sort(key=lambda x: (-x[1], -x[0], x[2]))
    batches: list[list[list[int]]] = []
    used = 0
    for size, _, piece in pieces:
        if batches and used + size <= budget:
            batches[-1].append(piece)
            used += size
        else:
            batches.append([piece])
            used = size
    return batches


def shuffled(keys: Sequence[str], *parts: object) -> list[int]:
    """Indices of ``keys`` ordered by the hash of (parts, key): the same whatever order the keys come in."""

    def digest(i: int) -> bytes:
        return hashlib.sha256("\x1f".join([*map(str, parts), keys[i]]).encode()).digest()

    return sorted(range(len(keys)), key=lambda i: (digest(i), keys[i]))
