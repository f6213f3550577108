"""Requests for small Python functions, each answered by a code block and a one-line explanation."""

from random import Random

from outrider.train.corpus.base import CorpusSplit, Exchange, pick_number, pick_template, split_entities

# Columns: task | function | parameters | body lines, separated by ; | return value | example arguments |
# result of the example
_ROWS = """
adds two numbers|add|a, b|return a + b|the sum of a and b|2, 3|5
subtracts two numbers|subtract|a, b|return a - b|the difference of a and b|7, 4|3
multiplies two numbers|multiply|a, b|return a * b|the product of a and b|4, 5|20
checks if a number is even|is_even|n|return n % 2 == 0|True if n is even and False otherwise|4|True
checks if a number is odd|is_odd|n|return n % 2 == 1|True if n is odd and False otherwise|4|False
returns the larger of two numbers|larger|a, b|if a > b:;    return a;return b|the larger of a and b|3, 8|8
returns the smaller of two numbers|smaller|a, b|if a < b:;    return a;return b|the smaller of a and b|3, 8|3
computes the factorial of a number|factorial|n|result = 1;for i in range(2, n + 1):;    result *= i;return result|the product of all numbers from 1 to n|5|120
computes the n-th Fibonacci number|fibonacci|n|a, b = 0, 1;for _ in range(n):;    a, b = b, a + b;return a|the n-th Fibonacci number|10|55
reverses a string|reverse|text|return text[::-1]|the text from back to front|"abc"|"cba"
counts the vowels in a string|count_vowels|text|return sum(1 for c in text if c in "aeiou")|how many vowels the text has|"banana"|3
sums a list of numbers|total|numbers|result = 0;for n in numbers:;    result += n;return result|the sum of all numbers in the list|[1, 2, 3]|6
finds the maximum of a list|maximum|numbers|best = numbers[0];for n in numbers:;    if n > best:;        best = n;return best|the largest number in the list|[4, 9, 2]|9
finds the minimum of a list|minimum|numbers|best = numbers[0];for n in numbers:;    if n < best:;        best = n;return best|the smallest number in the list|[4, 9, 2]|2
computes the average of a list|average|numbers|return sum(numbers) / len(numbers)|the sum divided by the number of items|[2, 4, 6]|4.0
checks if a number is prime|is_prime|n|if n < 2:;    return False;for i in range(2, n):;    if n % i == 0:;        return False;return True|True if n has no divisor other than 1 and itself|7|True
checks if a word is a palindrome|is_palindrome|word|return word == word[::-1]|True if the word reads the same in both directions|"level"|True
computes the area of a rectangle|rectangle_area|width, height|return width * height|the width times the height|3, 4|12
computes the area of a circle|circle_area|radius|return 3.14159 * radius ** 2|pi times the square of the radius|1|3.14159
converts Celsius to Fahrenheit|to_fahrenheit|celsius|return celsius * 9 / 5 + 32|the temperature in degrees Fahrenheit|10|50.0
squares every number in a list|squares|numbers|return [n * n for n in numbers]|a new list with the square of each number|[1, 2, 3]|[1, 4, 9]
keeps only the even numbers of a list|keep_even|numbers|return [n for n in numbers if n % 2 == 0]|a new list with the even numbers|[1, 2, 3, 4]|[2, 4]
counts the words in a text|count_words|text|return len(text.split())|the number of words in the text|"a good day"|3
makes a text upper case|shout|text|return text.upper()|the text in capital letters|"hello"|"HELLO"
greets a person by name|greet|name|return "Hello, " + name + "!"|a friendly greeting|"Anna"|"Hello, Anna!"
removes duplicates from a list|unique|items|seen = [];for item in items:;    if item not in seen:;        seen.append(item);return seen|the items without repetitions, in their order|[1, 1, 2]|[1, 2]
returns the last item of a list|last|items|return items[-1]|the last item of the list|[5, 6, 7]|7
returns the first item of a list|first|items|return items[0]|the first item of the list|[5, 6, 7]|5
sorts a list of numbers|sort_numbers|numbers|return sorted(numbers)|a new list in ascending order|[3, 1, 2]|[1, 2, 3]
checks if a list is empty|is_empty|items|return len(items) == 0|True if the list has no items|[]|True
swaps two values|swap|a, b|return b, a|the two values in the other order|1, 2|(2, 1)
computes the absolute value of a number|absolute|n|if n < 0:;    return -n;return n|the number without its sign|-4|4
computes the greatest common divisor|gcd|a, b|while b:;    a, b = b, a % b;return a|the largest number that divides both a and b|12, 18|6
repeats a text three times|repeat|text|return text * 3|the text written three times|"ab"|"ababab"
counts how often an item is in a list|count_item|items, item|count = 0;for x in items:;    if x == item:;        count += 1;return count|how often the item appears|[1, 2, 1], 1|2
joins words with spaces|join_words|words|return " ".join(words)|one text with spaces between the words|["a", "b"]|"a b"
"""
_ASK = (
    "Python function that {t}", "I am looking for a Python function that {t}.",
    "Create a Python function that {t}.", "Code a function that {t}.", "Make a function in Python that {t}.",
    "Define a Python function that {t}.", "I want a function that {t}.", "Write some Python that {t}.",
    "Write a Python function that {t}.", "Write a function that {t}.",
    "Can you write a Python function that {t}?", "I need a Python function that {t}.",
    "Give me a Python function that {t}.", "Show me a Python function that {t}.",
    "Please write a small Python function that {t}.", "How do I write a Python function that {t}?",
    "Write Python code that {t}.", "Implement a Python function which {t}.",
    "Help me with some Python: a function that {t}.",
)  # fmt: skip
_FOLLOW = ("How does it work?", "Can you explain the code?", "Show me an example.")


def rows() -> list[list[str]]:
    """Return the function table, one list of seven fields per function."""
    return [line.split("|") for line in _ROWS.strip().splitlines()]


def make(rng: Random, split: CorpusSplit) -> Exchange:
    """Generate a request for a function, from the table or with a random constant."""
    if rng.random() < 0.3:
        k = pick_number(rng, 2, 99, split, "constant")
        task, name, op, word = rng.choice(
            (
                ("multiplies a number by {k}", "times_{k}", "*", "product of n and {k}"),
                ("adds {k} to a number", "add_{k}", "+", "sum of n and {k}"),
            )
        )
        example = 3 * k if op == "*" else 3 + k
        row = [
            task.format(k=k),
            name.format(k=k),
            "n",
            f"return n {op} {k}",
            "the " + word.format(k=k),
            "3",
            str(example),
        ]
    else:
        row = rng.choice(split_entities(rows(), split, lambda r: r[1]))
    task, name, params, body, returns, args, result = row
    lines = "\n".join("    " + line for line in body.split(";"))
    answer = (
        f"Here is a Python function that {task}:\n\n```python\ndef {name}({params}):\n{lines}\n```\n\n"
        f"The function returns {returns}. For example, `{name}({args})` returns `{result}`."
    )
    turns = [(pick_template(rng, _ASK, split).format(t=task), answer)]
    if rng.random() < 0.3:
        follow = rng.choice(_FOLLOW)
        reply = (
            f"For example, `{name}({args})` returns `{result}`."
            if "example" in follow
            else f"The function `{name}` takes {params.replace(', ', ' and ')} and returns {returns}."
        )
        turns.append((follow, reply))
    return turns
