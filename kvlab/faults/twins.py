"""Which hypothesis of `kvlab.twin` each fault of the zoo is a case of. In one place, so that the two lists cannot drift apart.

What is in OUTSIDE moves logits and is in no hypothesis: a search has to answer "none of mine" there.
"""

from __future__ import annotations

TWINS: dict[str, str] = {
    "cache-not-reset": "foreign-before",
    "static-cache-not-reset": "foreign-before",
    "prefix-copied-shallow": "foreign-behind-prefix",
    "prefix-cache-aliased": "foreign-behind-prefix",
    "length-is-live": "foreign-behind-prefix",
    "look-writes": "foreign-behind-prefix",
    "stale-buffer": "stale-slots",
    "fork-shares-the-buffer": "slots-of-another",
    "no-copy-on-write": "slots-overwritten",
    "fork-without-reference": "slots-overwritten",
    "freed-on-cancel": "slots-overwritten",
    "hit-rounded-up": "slots-of-another",
    "prefix-of-another-length": "slots-of-another",
    "blocks-not-verified": "slots-of-another",
    "stale-hash": "slots-overwritten",
    "prefix-unchained": "found-elsewhere",
    "shift-without-rotation": "found-elsewhere",
    "last-token-fed-twice": "fed-twice",
    "pads-not-masked": "pads-seen",
    "mask-one-short": "newest-hidden",
    "window-one-too-wide": "window-in-prefill",
    "positions-restarted": "steps-at",
    "window-caps-the-length": "nothing-seen",
    "position-one-too-far": "steps-shifted",
    "prefill-from-one": "steps-shifted",
    "steps-count-pads": "steps-shifted",
    "one-offset-for-all": "steps-shifted",
    "conventions-mixed": "steps-shifted",
    "step-position-in-bf16": "steps-in-bits",
    "suffix-positions-from-zero": "from-zero-behind-prefix",
    "no-position-ids": "all-shifted",
    "right-padding-misread": "pad-read",
    "preempted-keeps-its-place": "slots-of-another",
    "cancelled-freed-too-early": "slots-of-another",
    "hit-before-written": "slots-overwritten",
    "row-not-reset": "stale-slots",
}

OUTSIDE: dict[str, str] = {
    "masked-row-is-nan": "its logits are no numbers",
    "old-weights-cache": "what the old weights computed cannot be had from the new ones",
    "beams-not-reordered": "a beam reads another beam's past, and which one changes from step to step",
    "output-cached": "the attention's output is kept, not keys and values",
    "angles-not-set-back": "the model turns by a longer request's angles, and keeps nothing of that request",
    "angles-in-bf16": "angles in fewer bits at a start the run does not tell",
    "chunk-off-by-one": "tokens are read twice or not at all, and where the pieces of a prompt begin the run does not tell",
    "tokenised-apart": "other token ids were fed than the prompt has",
}
