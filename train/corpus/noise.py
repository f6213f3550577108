"""Rewords questions, so that the model can answer phrasings that match no template.

Reworded questions do not count in the loss, so the model reads them but does not learn to write them.
"""

from random import Random

_BEFORE = (
    "please", "hey,", "hi,", "so", "well,", "now", "I wonder:", "I am curious:", "my friend asks:",
    "one more thing:", "a quick question:", "if you can,", "for my homework:", "I would be glad to know",
    "could you maybe", "would you mind", "would you please", "kindly", "let us see,", "my next question is",
    "I have to find out", "help me here:", "be so kind and", "I have been thinking about this:",
    "I want to know", "I need to know", "and", "okay,", "listen,", "dear assistant,", "for a quiz:",
    "just for fun,", "try to", "it would be nice if you could", "do you know", "my teacher wants to know",
)  # fmt: skip
_AFTER = (
    "please", "for me", "if you can", "thanks", "thank you", "right now", "in short", "in a simple way",
    "I am curious", "as well", "today", "quickly", "in detail", "for my homework", "for a friend", "or so",
    "exactly", "briefly", "step by step", "for school", "in your own words", "I need it",
)  # fmt: skip
_WORDS = (
    "make", "take", "show", "bring", "get", "find", "see", "say", "ask", "think", "look", "turn", "put",
    "keep", "set", "hold", "some", "any", "this", "that", "thing", "way", "kind", "sort", "which", "whose",
    "where", "when", "there", "here", "very", "quite", "really", "maybe", "also", "again", "another", "own",
    "about", "around", "inside", "between", "toward", "by", "from", "into", "with", "would", "should",
    "might", "could", "provide", "produce", "present", "determine", "figure out", "state", "reveal", "offer",
    "suggest", "mention", "sketch", "outline", "discuss", "clarify", "summarise", "value", "meaning", "idea",
    "basics", "role", "use", "place", "people", "everyone", "someone", "you", "me", "my", "your", "our", "it",
    "is", "are", "was", "be", "do", "does",
)  # fmt: skip


def _strip(word: str) -> str:
    return word.strip(".,:;?!\"'()").lower()


def perturb(rng: Random, question: str, answer: str) -> str:
    """Reword ``question``.

    Numbers, and words that also occur in ``answer``, stay in the question and keep their order. Other words
    are sometimes dropped or replaced. Phrases are sometimes added before and after the question. The result
    may be poor English, like the questions of users.
    """
    content = {_strip(w) for w in answer.split()}
    out = []
    changed = rng.choice((0.0, 0.15, 0.3, 0.5))
    for word in question.split():
        core = _strip(word)
        if core in content or any(c.isdigit() for c in word) or not core or rng.random() >= changed:
            out.append(word)
        else:
            if rng.random() < 0.6:
                out.append(rng.choice(_WORDS))
            if rng.random() < 0.15:
                out.append(rng.choice(_WORDS))
    text = " ".join(out) or question
    if rng.random() < 0.6:
        text = f"{rng.choice(_BEFORE)} {text[0].lower() + text[1:]}"
    if rng.random() < 0.4:
        end = text[-1] if text[-1] in ".?!" else ""
        text = f"{text.rstrip('.?!')}{rng.choice((',', ''))} {rng.choice(_AFTER)}{end}"
    roll = rng.random()
    if roll < 0.15:
        return text.lower().rstrip(".?!")
    if roll < 0.3:
        return text.rstrip(".?!")
    return text[0].upper() + text[1:]
