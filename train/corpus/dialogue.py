"""Small talk: greetings, questions about the assistant, plans, and advice over several turns."""

from random import Random

from outrider.train.corpus.base import CorpusSplit, Exchange, Turn, cap, pick_template, split_entities

_GREETINGS = ("Hello!", "Hi!", "Hello", "Hi", "Good morning!", "Hey there!", "Good evening!", "Greetings!")
_WHO = (
    "Who are you?",
    "What are you?",
    "What is your name?",
    "Tell me about yourself.",
    "Are you a human?",
    "Introduce yourself, please.",
)
_CAN = (
    "What can you do?",
    "How can you help me?",
    "What can I ask you?",
    "What do you know?",
    "Which topics do you know about?",
)
_HOW = ("How are you?", "How are you today?", "How do you do?", "How is it going?", "Are you doing well?")
_BYE = ("Goodbye!", "Bye!", "See you later!", "Good night!", "Farewell!")
_THANKS = ("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!", "Many thanks!")

_I_AM = (
    "I am Outrider, a small language model. I was trained to answer short questions about countries, science, "
    "numbers and everyday things."
)
_I_CAN = (
    "I can name countries and their capitals, write short lists, explain simple things, do small calculations, "
    "convert units and write small Python functions. What would you like to try?"
)

_ACTIVITIES = """
bake bread|flour, water, salt and yeast|mix everything and knead the dough for ten minutes|let the dough rest for one hour|bake it for forty minutes|the crust should be golden brown
make tea|water, tea leaves and a cup|boil the water|pour it over the leaves|wait for three minutes|a little honey makes it sweet
plant a tree|a young tree, a spade and water|dig a hole that is twice as wide as the roots|put the tree in and fill the hole with soil|water it well|autumn is a good time for it
cook pasta|pasta, water and salt|boil a large pot of water and add salt|put the pasta in and stir|drain it after ten minutes|taste it before you drain it
clean a bicycle|a bucket, soap, a sponge and oil|rinse the dirt off with water|wash the frame with soap and a sponge|dry it and put a drop of oil on the chain|do it once a month
write a letter|paper, a pen and an envelope|write the date and a greeting at the top|say what you want to say in short paragraphs|sign it and put it in the envelope|read it once more before you send it
paint a wall|paint, a brush, a roller and tape|cover the floor and tape the edges|paint the corners with the brush|paint the rest with the roller|keep the windows open
make a salad|lettuce, tomatoes, oil and lemon juice|wash and cut the vegetables|mix oil, lemon juice and a little salt|pour the dressing over the salad|serve it at once
prepare for an exam|notes, a plan and a quiet place|make a list of all topics|study one topic each day|repeat the hard topics at the end|sleep well the night before
learn to swim|a swimsuit, a towel and a teacher|get used to the water|practise floating on your back|learn one stroke after the other|never swim alone
make pancakes|flour, milk, eggs and butter|mix flour, milk and eggs|heat a little butter in a pan|fry each pancake for two minutes on each side|fresh fruit tastes good with them
build a birdhouse|boards, nails, a saw and a hammer|cut the boards to size|nail the walls and the floor together|put the roof on and hang it in a tree|the hole should be small
organise a birthday party|guests, a cake and some music|write a list of guests and send invitations|buy the food and decorate the room|light the candles and sing|ask a friend to help
start a garden|seeds, soil, tools and sunlight|choose a sunny place|loosen the soil and sow the seeds|water them every morning|begin with herbs
wash a car|a bucket, soap and two sponges|rinse the car with water|wash it from top to bottom|dry it with a soft cloth|do it in the shade
make soup|vegetables, water, salt and herbs|cut the vegetables into small pieces|cook them in water for half an hour|add salt and herbs|a slice of bread goes well with it
"""
_ACT_ASK = (
    "Teach me to {a}.", "I need to {a}.", "What do I do to {a}?", "I plan to {a}. Any advice?",
    "Show me how to {a}.", "What is the best way to {a}?", "Help me {a}.", "Let us {a}.", "How do I {a}?",
    "How can I {a}?", "I want to {a}. What should I do?", "Can you help me {a}?", "Explain how to {a}.",
    "What are the steps to {a}?", "Tell me how to {a}.", "I would like to {a}. Where do I start?",
    "Guide me through it: I need to {a}.", "Which steps does it take to {a}?",
)  # fmt: skip
_FEELINGS = """
tired|Rest is important. Try to go to bed early, drink some water and take a short walk in fresh air.
sad|I am sorry to hear that. It can help to talk to a friend, listen to music you like or take a walk.
bored|Maybe you can read a book, call a friend or learn something new. I could also ask you a question about countries.
happy|That is wonderful to hear! Enjoy the moment and share your joy with someone.
nervous|Take a few slow breaths and think about one small step you can take next. It is normal to feel this way.
hungry|You could make a quick salad or some pasta. A glass of water and a piece of fruit are also a good start.
lost|Do not worry. Tell me what you are trying to do, and we can go through it step by step.
excited|That sounds great! Tell me what you are looking forward to.
lonely|I am sorry that you feel this way. It can help to call a friend or to join a group that shares your hobby.
stressed|Try to write down your tasks and begin with the smallest one. Short breaks help too.
"""
_FEEL_ASK = (
    "I feel a bit {f}.", "I am very {f}.", "I am feeling {f}.", "What can I do when I am {f}?", "I am {f}.",
    "I feel {f}.", "I am so {f} today.", "Today I feel {f}.", "I'm {f}. What should I do?",
    "Right now I am rather {f}, any advice?",
)  # fmt: skip


def _activity(rng: Random, split: CorpusSplit) -> Exchange:
    table = [line.split("|") for line in _ACTIVITIES.strip().splitlines()]
    name, needs, one, two, three, tip = rng.choice(split_entities(table, split, lambda r: r[0]))
    steps = f"1. {cap(one)}.\n2. {cap(two)}.\n3. {cap(three)}."
    turns: list[Turn] = [
        (
            pick_template(rng, _ACT_ASK, split).format(a=name),
            f"To {name}, you need {needs}. Follow these steps:\n\n{steps}\n\nHere is a tip: {tip}.",
        )
    ]
    roll = rng.random()
    if roll < 0.25:
        turns.append(("What do I need?", f"You need {needs}."))
    elif roll < 0.45:
        turns.append(("What is the first step?", f"The first step is this: {one}."))
    elif roll < 0.6:
        turns.append(("What comes after that?", f"After that, {two}. Then {three}."))
    return turns


def thanks(rng: Random, split: CorpusSplit) -> Turn:
    """Return a thank-you turn. Many conversations join two exchanges with such a turn."""
    return pick_template(
        rng, _THANKS, split
    ), "You are welcome! Is there anything else that you would like to know?"


def make(rng: Random, split: CorpusSplit) -> Exchange:
    """Generate a piece of small talk."""
    kind = (
        rng.random() if split is CorpusSplit.TRAIN else rng.uniform(0.37, 1.0)
    )  # Other small talk asks about no entity, so that nothing can be held out.
    if kind < 0.1:
        return [(pick_template(rng, _GREETINGS, split), "Hello! How can I help you today?")]
    if kind < 0.2:
        return [(pick_template(rng, _WHO, split), _I_AM)]
    if kind < 0.28:
        return [(pick_template(rng, _CAN, split), _I_CAN)]
    if kind < 0.33:
        return [
            (
                pick_template(rng, _HOW, split),
                "I am doing well, thank you for asking! How can I help you today?",
            )
        ]
    if kind < 0.37:
        return [(pick_template(rng, _BYE, split), "Goodbye! It was nice to talk to you. Come back any time.")]
    if kind < 0.5:
        table = [line.split("|") for line in _FEELINGS.strip().splitlines()]
        feeling, answer = rng.choice(split_entities(table, split, lambda r: r[0]))
        return [(pick_template(rng, _FEEL_ASK, split).format(f=feeling), answer)]
    return _activity(rng, split)
