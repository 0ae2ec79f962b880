"""Faults of a block manager: who may write a shared block, who counts it, and what it can be found by."""

from __future__ import annotations

from kvlab.faults.zoo import Fault, add

MANAGER = "kvlab.core.blocks:BlockManager"


def _never_copy(self, i) -> bool:
    return False


def _share_uncounted(self, table, owner) -> None:
    """A second table names the blocks, and no count is raised."""


def _reclaim_all(self, seq, table, owner) -> None:
    """The clean-up of a path that was written in a hurry: every block of the request goes back, whatever its count."""
    for i in reversed(table):
        block = self._blocks[i]
        block.ref_count = 0
        block.owners = {}
        block.last_access = self._clock
        if i not in self._evictable and i not in self._blank:
            self._reclaim(i)
        self._log("release", seq, owner, i)


def _keep_hash(self, i) -> None:
    """The block is about to hold something else, and can still be found by what it held."""


def _release_unshared(self, seq, table, owner) -> None:
    """A clean-up that leaves blocks alone which others use, and so never takes its own reference back."""
    for i in reversed(table):
        if self._blocks[i].ref_count == 1:
            self._release(i, owner)
            self._log("release", seq, owner, i)


add(
    Fault(
        name="no-copy-on-write",
        breaks=f"{MANAGER}._must_copy",
        broken=_never_copy,
        symptom="After a fork one branch goes on with what the other said.",
        mechanism="A token is written into a block that two tables name; whoever wrote last is what both read.",
        family="foreign state",
        detector="check(): contents; the owner scan: a block written while another request holds it.",
        fix="Before a write, look at the reference count; above one, copy the block and write the copy.",
        cases=("huggingface/transformers#37078", "huggingface/transformers#32159"),
        claims=("B6", "C9", "C21", "C24"),
    )
)
add(
    Fault(
        name="fork-without-reference",
        breaks=f"{MANAGER}._share",
        broken=_share_uncounted,
        symptom="A forked request is right until its parent ends; then it reads whoever comes next.",
        mechanism="The fork's table names the blocks, but their counts stay at one: the parent's end frees them.",
        family="foreign state",
        detector="check(): references; the owner scan: a block handed out while a request holds it.",
        fix="Raise every block's count when a second table names it, before anything else can fail.",
        cases=("vllm-project/vllm#1556", "vllm-project/vllm#3347"),
        claims=("C1",),
    )
)
add(
    Fault(
        name="freed-on-cancel",
        breaks=f"{MANAGER}._give_back",
        broken=_reclaim_all,
        symptom="When one request is cancelled, another that shares its blocks goes on with a third one's words.",
        mechanism="The cancel path returns all blocks to the pool without a look at their counts.",
        family="foreign state",
        detector="check(): references; the owner scan: a block handed out while a request holds it.",
        fix="One path for every ending: lower the count, and free at zero.",
        cases=("vllm-project/vllm#37076", "jjang-ai/vmlx#198", "sgl-project/sglang#38319"),
        claims=("C1", "C18"),
    )
)
add(
    Fault(
        name="stale-hash",
        breaks=f"{MANAGER}._unpublish",
        broken=_keep_hash,
        symptom="A prompt that was served before is answered from what has replaced it in the cache.",
        mechanism="An evicted block keeps its place in the prefix index: its old prompt finds the new contents.",
        family="foreign state",
        detector="check(): contents, while the new holder lives; the owner scan: a block found by what it no longer holds.",
        fix="Evict means unmap: clear the hash and the index entry before the block is used again.",
        cases=("vllm-project/vllm#4761", "vllm-project/vllm#5364", "ovg-project/kvcached#362", "Wenyueh/MinivLLM#87"),
        claims=("B6", "B18"),
    )
)
add(
    Fault(
        name="leaked-reference",
        breaks=f"{MANAGER}._give_back",
        broken=_release_unshared,
        symptom="With sharing on, free memory shrinks until nothing is admitted; every answer is right.",
        mechanism="A request that ends does not take back its references to shared blocks, so they never reach zero.",
        family="foreign state",
        detector="check(): references; blocks whose owner has no live request, with a last access long ago.",
        fix="Lower the count of every block in the table, shared or not.",
        cases=("sgl-project/sglang#35270", "sgl-project/sglang-jax#982"),
        claims=("B15",),
    )
)
