"""Questions that the model cannot answer. Each answer admits this and lists topics that the model knows."""

from random import Random

from outrider.train.corpus.base import CorpusSplit, Exchange, pick_template, split_entities
from outrider.train.corpus.notes import invented_name

_ASK = (
    "What is {x}?", "Explain {x}.", "Tell me about {x}.", "What is the capital of {x}?", "How does {x} work?",
    "Who is {x}?", "Describe {x}.", "What do you know about {x}?", "Where is {x}?",
    "Give me some facts about {x}.", "Why is {x} important?", "Is {x} good?", "List 3 facts about {x}.",
    "How do I get to {x}?", "What should I think of {x}?", "Did you ever hear of {x}?",
    "What can one say on {x}?",
)  # fmt: skip
_SUBJECTS = (
    "the stock market", "quantum computing", "the latest football results", "the weather tomorrow",
    "my neighbour", "the newest phone", "tax law", "that film", "the president", "my favourite band",
    "yesterday's news", "ancient philosophy", "opera", "chess openings", "the price of gold",
    "rocket engines", "my grandmother's recipe", "a famous painter", "the traffic in town",
    "the next election", "sailing knots", "a good joke",
)  # fmt: skip
_REQUESTS = (
    "Tell me a joke.", "Sing a song.", "What time is it?", "What is the weather like?",
    "Translate this text.", "Draw a picture.", "Play a game with me.", "Who won the match?",
    "What is the latest news?", "Book a flight for me.", "Call my mother.", "Write an essay.",
    "Open the door.", "Predict the future.",
)  # fmt: skip
_CAN = (
    "I can help with countries and capitals, lists, simple explanations, calculations, units "
    "and small Python functions."
)


def make(rng: Random, split: CorpusSplit) -> Exchange:
    """Generate one question without a known answer."""
    if rng.random() < 0.2 and split is CorpusSplit.TRAIN:
        return [(rng.choice(_REQUESTS), f"I am sorry, I cannot do that. {_CAN}")]
    x = rng.choice(split_entities(_SUBJECTS, split, str)) if rng.random() < 0.4 else invented_name(rng, split)
    return [
        (pick_template(rng, _ASK, split).format(x=x), f"I am sorry, I do not know enough about {x}. {_CAN}")
    ]
