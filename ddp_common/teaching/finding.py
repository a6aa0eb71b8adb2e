"""What a check says of a wrong answer: what it saw, what it expected, and a question."""

from dataclasses import dataclass


@dataclass
class Finding:
    """What is wrong with an answer."""

    yours: str
    expected: str
    question: str

    def __str__(self):
        return f"not yet\n  yours:    {self.yours}\n  expected: {self.expected}\n  {self.question}"

    def in_a_line(self) -> str:
        return f"not yet: yours {self.yours}, expected {self.expected}. {self.question}"
