"""Lists of everyday things, each with a short remark."""

from random import Random

from outrider.train.corpus.base import (
    CorpusSplit,
    Exchange,
    Turn,
    cap,
    pick_template,
    skewed_index,
    split_entities,
)

_ROWS = """
fruits|apple=crisp and sweet, and it grows on trees|banana=soft and yellow, and it is easy to peel|orange=juicy and full of vitamin C|grape=small and sweet, and it grows on vines|mango=sweet and tropical|strawberry=red and fragrant|pear=soft and juicy|cherry=small and red with a stone inside
vegetables|carrot=orange and crunchy, and it grows under the ground|tomato=red and juicy, and good in salads|potato=starchy and filling|onion=strong in taste and used in many dishes|spinach=green and rich in iron|cucumber=fresh and full of water|pepper=colourful and crunchy|broccoli=green and healthy
colours|red=the colour of fire and roses|blue=the colour of the sky and the sea|green=the colour of grass and leaves|yellow=the colour of the sun and lemons|orange=a warm mix of red and yellow|purple=a mix of red and blue|black=the colour of the night|white=the colour of snow
planets|Mercury=the closest planet to the Sun|Venus=the hottest planet|Earth=the planet we live on|Mars=the red planet|Jupiter=the largest planet|Saturn=the planet with bright rings|Uranus=a cold planet that lies on its side|Neptune=the farthest planet from the Sun
sports|football=played by two teams with a ball|tennis=played with rackets and a small ball|swimming=done in water and good for the whole body|basketball=played with a ball and a high hoop|running=simple and possible almost anywhere|cycling=done on a bicycle|volleyball=played over a net|skiing=done on snow in the mountains
animals|dog=a loyal friend of people|cat=a quiet and curious pet|horse=strong and fast, and people ride it|elephant=the largest animal on land|lion=a big cat that lives in groups|dolphin=a clever animal of the sea|rabbit=small, soft and quick|bear=big and strong, and it sleeps in winter
musical instruments|piano=played with black and white keys|guitar=played by plucking six strings|violin=played with a bow|drum=played with sticks or hands|flute=played by blowing air over a hole|trumpet=a loud brass instrument|harp=played by plucking many strings|clarinet=a woodwind instrument with a reed
jobs|teacher=helps students to learn|doctor=takes care of sick people|baker=makes bread and cakes|engineer=designs and builds things|farmer=grows food and keeps animals|nurse=looks after patients|carpenter=makes things out of wood|pilot=flies airplanes
drinks|water=the most important drink of all|tea=made from leaves and hot water|coffee=made from roasted beans|milk=white and rich in calcium|orange juice=sweet and full of vitamin C|lemonade=made from lemons, water and sugar|hot chocolate=warm and sweet
healthy habits|sleep enough=the body needs rest to repair itself|drink water=the body works better when it has enough water|eat vegetables=they are full of vitamins|walk every day=it is good for the heart|take breaks=the mind needs rest too|read books=it keeps the mind active|wash your hands=it stops germs from spreading
ways to save energy|turn off the lights=empty rooms need no light|use the bicycle=short trips do not need a car|close the windows=warm air stays inside|wash at low temperature=less hot water means less energy|use the stairs=the elevator needs electricity|dry clothes outside=the sun does the work for free
school subjects|mathematics=the study of numbers and shapes|history=the study of the past|biology=the study of living things|physics=the study of matter and energy|geography=the study of the Earth and its countries|music=the study of sounds and songs|art=the study of drawing and painting|chemistry=the study of substances
inventions|the wheel=it made it easy to move heavy things|the printing press=it made books cheap|the telephone=it lets people talk over long distances|the light bulb=it brought light to dark rooms|the airplane=it made long journeys short|the computer=it can follow any list of instructions|the camera=it keeps moments in pictures
pizza toppings|cheese=melted and creamy|tomato sauce=the classic base|mushrooms=soft and full of taste|olives=salty and small|basil=green and fragrant|onions=sweet when they are baked|peppers=colourful and crunchy
oceans|the Pacific Ocean=the largest ocean|the Atlantic Ocean=it lies between Europe and America|the Indian Ocean=it lies south of India|the Arctic Ocean=the smallest and coldest ocean|the Southern Ocean=it surrounds Antarctica
programming languages|Python=easy to read and good for beginners|JavaScript=it runs in every web browser|Java=it is used in many large companies|C=it is fast and close to the machine|Rust=it is fast and checks memory safety|SQL=it is used to ask questions to databases|Go=it is simple and good for servers
pets|dog=it is loyal and likes long walks|cat=it is quiet and likes to sleep|hamster=it is small and active at night|parrot=it is colourful and can learn words|goldfish=it is calm and needs clean water|rabbit=it is soft and eats hay
gifts|a book=good for long evenings|flowers=they make every room brighter|chocolate=sweet and easy to share|a picture frame=it holds a nice memory|a game=fun for the whole family|a warm scarf=useful in winter
tools|hammer=it drives nails into wood|saw=it cuts wood|screwdriver=it turns screws|drill=it makes holes|wrench=it turns nuts and bolts|pliers=they hold small things
flowers|rose=red or white, with thorns|tulip=a colourful flower of spring|sunflower=tall and yellow|daisy=small and white|lily=elegant and fragrant|orchid=rare and beautiful
ways to learn a language|listen every day=your ear gets used to the sounds|speak with people=practice makes you confident|read simple books=you learn new words in context|write a diary=you use the new words yourself|watch films=you hear natural speech|repeat new words=your memory needs it
things to pack for a trip|a passport=you need it at the border|a toothbrush=you need it every day|warm clothes=the nights may be cold|a phone charger=your battery will run out|a water bottle=it keeps you fresh|a map=it works without a battery|an umbrella=it may rain
"""
_ASK = (
    "{n} {c}", "Show me {n} {c}.", "I want {n} {c}.", "Let me know {n} {c}.", "Write {n} {c}.",
    "Make a list of {n} {c}.", "Do you know {n} {c}?", "I am looking for {n} {c}.", "Suggest {n} {c}.",
    "List {n} {c}.", "Name {n} {c}.", "Give me {n} {c}.", "Can you list {n} {c}?", "Tell me {n} {c}.",
    "What are {n} {c}?", "Please name {n} {c}.", "Write a list of {n} {c}.", "I need a list of {n} {c}.",
    "Write down {n} {c} for me, with a remark on each.", "Could you come up with {n} {c}?",
)  # fmt: skip
_WORDS = {3: "three", 4: "four", 5: "five"}


def categories() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the table as (category, [(item, remark)]) pairs."""
    out = []
    for line in _ROWS.strip().splitlines():
        name, *items = line.split("|")
        out.append((name, [(i.split("=")[0], i.split("=")[1]) for i in items]))
    return out


def make(rng: Random, split: CorpusSplit) -> Exchange:
    """Generate a list. Sometimes a question about one of the list's entries follows."""
    name, items = rng.choice(split_entities(categories(), split, lambda c: c[0]))
    n = rng.choice((3, 3, 4, 5))
    pool = list(items)
    chosen = (
        pool[:n] if rng.random() < 0.6 else [pool.pop(skewed_index(rng, len(pool), 0.75)) for _ in range(n)]
    )
    word = str(n) if rng.random() < 0.6 else _WORDS[n]
    body = "\n".join(f"{i}. {cap(item)}: {remark}." for i, (item, remark) in enumerate(chosen, 1))
    turns: list[Turn] = [
        (pick_template(rng, _ASK, split).format(n=word, c=name), f"Here are {word} {name}:\n\n{body}")
    ]
    if rng.random() < 0.3:
        ordinal = rng.randrange(len(chosen))
        item, remark = chosen[ordinal]
        which = ("first", "second", "third", "fourth", "fifth")[ordinal]
        turns.append((f"What is the {which} one?", f"The {which} one is {item}: {remark}."))
    elif rng.random() < 0.2:
        turns.append(("How many did you list?", f"I listed {word} {name}."))
    return turns
