"""Concepts with short explanations, written for this corpus.

The columns are: term | definition | mechanism | relevance or an example.
"""

_ROWS = """
photosynthesis|Photosynthesis is the way plants make their own food from light.|The leaves take in sunlight, water and carbon dioxide and turn them into sugar and oxygen.|It matters because almost all life on Earth depends on the food and the oxygen that plants make.
gravity|Gravity is the force that pulls objects towards each other.|The more mass an object has, the stronger it pulls, and the pull gets weaker with distance.|For example, gravity keeps the Moon in its orbit and makes an apple fall to the ground.
the water cycle|The water cycle is the journey of water between the sea, the sky and the land.|The sun heats the sea, water rises as vapour, forms clouds and falls back as rain or snow.|It matters because it brings fresh water to rivers, fields and people.
electricity|Electricity is the flow of tiny charged particles called electrons.|A battery or a power plant pushes the electrons through a wire, and they carry energy to a device.|For example, electricity lights our homes and runs our computers.
a rainbow|A rainbow is an arc of colours in the sky.|Sunlight enters raindrops, bends, reflects inside them and splits into its colours.|You can see one when the sun is behind you and rain is in front of you.
the Moon|The Moon is a rocky ball that travels around the Earth.|It takes about 27 days for one orbit and reflects the light of the sun.|It matters because its gravity causes the tides in the sea.
the Sun|The Sun is the star at the centre of our solar system.|Deep inside it, hydrogen is turned into helium, and this releases light and heat.|It matters because without it the Earth would be dark and frozen.
a volcano|A volcano is an opening in the ground where hot melted rock comes out.|Pressure builds up below the surface until lava, ash and gas burst out.|For example, Mount Fuji in Japan is a famous volcano.
an earthquake|An earthquake is a sudden shaking of the ground.|Large plates of rock under the surface push against each other and slip.|It matters because strong earthquakes can damage buildings and roads.
the heart|The heart is a muscle that pumps blood through the body.|It squeezes about 70 times a minute and sends blood to the lungs and to all other organs.|It matters because the blood brings oxygen and food to every cell.
the brain|The brain is the organ that controls the body and lets us think.|Billions of nerve cells send small electric signals to each other.|It matters because it handles our senses, memories, movements and feelings.
a cell|A cell is the smallest living unit of the body.|It takes in food, makes energy and can divide into two new cells.|For example, the human body has trillions of cells.
an atom|An atom is the smallest piece of an element.|It has a tiny nucleus of protons and neutrons, and electrons move around it.|For example, a drop of water holds a huge number of atoms.
evolution|Evolution is the slow change of living things over many generations.|Animals and plants with useful traits survive more often and pass these traits on.|For example, birds evolved from small dinosaurs.
a battery|A battery is a device that stores energy in chemicals.|When it is connected, a chemical reaction pushes electrons through the wire.|For example, a battery powers a phone or a flashlight.
the internet|The internet is a worldwide network of computers.|Messages are cut into small packets, sent through many cables and put together again at the end.|It matters because it lets people share information in seconds.
a computer|A computer is a machine that follows instructions.|Its processor reads a program step by step, and its memory keeps the data.|For example, a computer can add numbers, show pictures and send messages.
an algorithm|An algorithm is a list of clear steps that solves a problem.|You start with an input, follow the steps in order and get an output.|For example, a recipe is an algorithm for making a cake.
a database|A database is an organised collection of data.|It keeps the data in tables, and a program can search, add or change the rows.|For example, a library uses a database to keep track of its books.
a vaccine|A vaccine is a medicine that trains the body to fight a disease.|It shows the immune system a harmless piece of a germ, so that it can learn to recognise it.|It matters because it prevents people from getting seriously ill.
bread|Bread is a food made from flour, water, salt and yeast.|The yeast makes bubbles of gas in the dough, the dough rises, and the oven bakes it.|For example, people eat bread for breakfast all over the world.
recycling|Recycling is the process of turning old materials into new ones.|Paper, glass and metal are collected, sorted, cleaned and made into new products.|It matters because it saves energy and keeps waste out of nature.
solar power|Solar power is energy that comes from sunlight.|Solar panels have cells that turn light directly into electricity.|It matters because it is clean and will not run out.
wind power|Wind power is energy that comes from moving air.|The wind turns the blades of a turbine, and a generator turns the motion into electricity.|It matters because it makes power without smoke.
a magnet|A magnet is an object that attracts iron.|It has a north pole and a south pole, and opposite poles attract each other.|For example, a compass needle is a small magnet that points north.
sound|Sound is a vibration that travels through air, water or solid things.|A moving object shakes the air, and the waves reach our ears.|For example, a guitar string makes sound when it vibrates.
light|Light is a form of energy that we can see.|It travels in straight lines and is faster than anything else.|For example, light from the Sun needs about eight minutes to reach the Earth.
the seasons|The seasons are the four parts of the year: spring, summer, autumn and winter.|The axis of the Earth is tilted, so each half gets more sunlight in one part of the year.|For example, when it is summer in Europe, it is winter in Australia.
the tides|The tides are the rise and fall of the sea.|The gravity of the Moon and the Sun pulls the water of the oceans.|For example, many coasts have two high tides every day.
a black hole|A black hole is a place in space where gravity is extremely strong.|It forms when a very large star collapses, and even light cannot escape from it.|It matters because it helps scientists understand gravity.
a desert|A desert is a dry place with very little rain.|Few plants grow there, the days are often hot and the nights can be cold.|For example, the Sahara in Africa is the largest hot desert.
a rainforest|A rainforest is a dense forest with a lot of rain.|Tall trees form a roof of leaves, and many animals live between the roof and the ground.|For example, the Amazon in South America is the largest rainforest.
a river|A river is a long stream of fresh water that flows to the sea.|It starts at a spring or a glacier and grows as smaller streams join it.|For example, the Nile in Africa is one of the longest rivers.
inflation|Inflation is a general rise of prices.|When it happens, the same amount of money buys fewer things than before.|For example, a loaf of bread may cost two coins this year and three coins next year.
democracy|Democracy is a form of government in which the people decide.|Citizens vote in elections and choose the people who make the laws.|It matters because it lets everyone have a say.
a budget|A budget is a plan for money.|You write down what you earn and what you spend, and you compare the two.|It matters because it helps you save and avoid debt.
exercise|Exercise is any activity that makes the body work.|The heart beats faster, the muscles get stronger and the lungs take in more air.|It matters because it keeps the body healthy and improves the mood.
sleep|Sleep is a time of rest for the body and the brain.|During sleep the body repairs itself and the brain sorts memories.|It matters because people who sleep well learn better and feel better.
honey|Honey is a sweet food made by bees.|Bees collect nectar from flowers, carry it to the hive and let the water dry out.|For example, many people put honey in tea.
cheese|Cheese is a food made from milk.|The milk is made thick, the liquid is drained, and the rest is pressed and stored.|For example, France is famous for its many kinds of cheese.
an airplane|An airplane is a machine that flies.|Its engines push it forward, and the shape of the wings creates lift.|It matters because it lets people cross oceans in a few hours.
a bicycle|A bicycle is a vehicle with two wheels.|The rider pushes the pedals, and a chain turns the rear wheel.|It matters because it is cheap, healthy and does not pollute the air.
a refrigerator|A refrigerator is a machine that keeps food cold.|A pump moves a liquid through tubes, and the liquid carries the heat out of the box.|It matters because cold food stays fresh for longer.
a microscope|A microscope is a tool that makes small things look big.|Its lenses bend the light and enlarge the picture.|For example, doctors use a microscope to look at blood cells.
a telescope|A telescope is a tool that makes far things look near.|It collects light with a lens or a mirror and enlarges the picture.|For example, with a telescope you can see the rings of Saturn.
a bridge|A bridge is a structure that carries a road over water or a valley.|Its pillars, arches or cables lead the weight safely to the ground.|For example, the Golden Gate Bridge is a famous bridge in the United States.
music|Music is the art of arranging sounds in time.|It combines melody, rhythm and harmony, and people play it or sing it.|It matters because it brings people together and expresses feelings.
a poem|A poem is a short text that plays with words.|It often uses rhythm, rhyme and pictures to express a feeling.|For example, many poems are about love, nature or time.
the alphabet|The alphabet is the set of letters that we use to write words.|The English alphabet has 26 letters, from A to Z.|It matters because with a few letters we can write every word.
a prime number|A prime number is a whole number with exactly two divisors, one and itself.|To test a number, you check whether any smaller number divides it without a rest.|For example, 2, 3, 5, 7 and 11 are prime numbers.
a fraction|A fraction is a part of a whole.|The number at the bottom says into how many parts the whole is cut, and the number at the top says how many parts you take.|For example, one half is the same as two quarters.
a triangle|A triangle is a shape with three sides and three corners.|Its three angles always add up to 180 degrees.|For example, many roofs have the shape of a triangle.
friendship|Friendship is a close bond between people who like and trust each other.|Friends share their time, help each other and listen.|It matters because a good friend makes hard days easier.
a library|A library is a place where books are kept and lent.|You look for a book, borrow it for some weeks and bring it back.|It matters because everyone can read and learn there for free.
fire|Fire is a fast chemical reaction that gives off heat and light.|It needs fuel, oxygen and heat, and it stops when one of them is missing.|For example, people use fire to cook food and to keep warm.
ice|Ice is water in its solid form.|Water freezes at 0 degrees Celsius, and the ice is lighter than the liquid, so it floats.|For example, icebergs float in the cold sea.
a cloud|A cloud is a group of tiny drops of water in the sky.|Warm air rises and cools down, and the vapour in it turns into drops.|It matters because clouds bring rain and shade.
lightning|Lightning is a giant spark between a cloud and the ground.|Drops and ice in the cloud rub against each other and build up an electric charge.|It matters because it is dangerous to stand under a tree in a storm.
plastic|Plastic is a material that can be formed into almost any shape.|It is made from oil, heated and pressed into a mould.|It matters because it is useful but stays in nature for a very long time.
memory|Memory is the ability to keep and recall information.|The brain makes some connections between nerve cells stronger when we learn.|For example, repeating a word several times helps us remember it.
"""


def rows() -> list[tuple[str, str, str, str]]:
    """Return (term, definition, mechanism, relevance) for every concept."""
    parts = [line.split("|") for line in _ROWS.strip().splitlines()]
    return [(p[0], p[1], p[2], p[3]) for p in parts]
