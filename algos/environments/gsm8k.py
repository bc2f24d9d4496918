"""GSM8K's word problems with a calculator, which the model calls as the data's annotations do: `48/2 = <<48/2>>`."""

from __future__ import annotations

from algos.environments.builtin import calculator
from algos.rewards.math import math_verify_reward

CALL_REWARD = 0.1


class Gsm8kCalculator:
    """A turn that ends in `<<48/2>>` observes `24`, or what is wrong with its call; one without a call ends the
    trajectory. The reward is 1 for the right final answer, as without a calculator, and 0.1 for a call that the
    calculator could compute. A trajectory that its length limit has cut has no final answer."""

    def reset(self, answer: str) -> None:
        self._answer, self._text = answer, ""
        self._has_ended = self._has_called = False

    def step(self, text: str) -> str | None:
        self._text += text
        _, opening, call = text.rstrip().rpartition("<<")
        expression, closing, rest = call.partition(">>")
        if not opening or rest:
            self._has_ended = True
            return None
        try:
            if not closing:
                raise ValueError
            observation = calculator(expression)
            self._has_called = True
        except ValueError:
            observation = "error: write numbers with +, -, *, / and parentheses between << and >>"
        except ZeroDivisionError:
            observation = "error: division by zero"
        self._text += observation
        return observation

    def get_reward(self) -> float:
        is_right = self._has_ended and math_verify_reward([""], [self._text], answer=[self._answer]) == [1.0]
        return is_right + CALL_REWARD * self._has_called
