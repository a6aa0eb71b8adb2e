"""Whatever a person types into a variable is a value or one clear `Error`, nothing else."""

import math
import os
from contextlib import contextmanager

from hypothesis import HealthCheck, example, given
from hypothesis import settings as how
from hypothesis import strategies as st

from ddp_common import Error, settings
from ddp_common.clusters.connect import describe
from ddp_common.clusters.profiles import number_of_workers

DEFAULTS = dict(
    epochs=3, seed=0, learning_rate=1e-3, held_out=0.15, layers=2, shuffle=True, name="small"
)
LIMITS = {"held_out": (0.01, 0.45), "layers": (None, 16)}
few = how(
    max_examples=int(os.environ.get("EXAMPLES", 40)),
    deadline=None,
    derandomize="EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)

# What the environment can hold, with a liking for what means something to a shell, to YAML, or to
# a number.
typed = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
        st.sampled_from("=.'\"\\ []{}:-#&*!|>%@`$,~/?0123456789eE+_\n"),
    ),
    max_size=40,
)
NUMBERS = ["", "0", "-1", "1e9", "1_0", "nan", "-inf", "1e400", "9" * 5000, "०", " 1", ".inf"]
numbers = st.one_of(st.integers().map(str), st.floats().map(str), st.sampled_from(NUMBERS))
YAML = ["[1", "{a: 1", "!!python/object/apply:os.system [true]", "!!int x", "&a [*a]", "{[1]: 2}"]
YAML += ["2026-99-99", "[" * 3000, "12:00:00", "? x", "a: b: c", "\t", "{<<: 1}"]
yaml_like = st.one_of(numbers, typed, st.sampled_from(YAML))


@contextmanager
def environment(**variables):
    before = dict(os.environ)
    try:
        os.environ.update(variables)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def pairs(names, values):
    """Text such as 'epochs=3 name=x', of these names and others."""
    word = st.one_of(
        typed, st.tuples(st.one_of(st.sampled_from(names), typed), values).map("=".join)
    )
    return st.lists(word, max_size=3).map(" ".join)


def value_or_error(ask, *arguments):
    try:
        return ask(*arguments)
    except Error as error:
        said = str(error)
        assert said and "Traceback" not in said
        return None


@few
@given(pairs(sorted(DEFAULTS), numbers))
@example("seed=99999999999999999999")
@example("learning_rate=1e-400")
def test_any_text_in_set_gives_settings_within_their_limits_or_an_error(text):
    with environment(SET=text):
        values = value_or_error(lambda: settings("demo", limits=LIMITS, **DEFAULTS))
    if values is not None:
        assert {name: type(value) for name, value in vars(values).items()} == {
            name: type(value) for name, value in DEFAULTS.items()
        }
        assert (
            1 <= values.epochs <= 10**12
            and 0 <= values.seed <= 10**12
            and 1 <= values.layers <= 16
        )
        assert (
            math.isfinite(values.learning_rate)
            and values.learning_rate > 0
            and 0.01 <= values.held_out <= 0.45
        )


OPTION_NAMES = ["workers", "timeout", "cores", "memory", "walltime", "cores.x", ".", "a..b"]
OPTION_NAMES += ["scheduler_options.interface", "job_script_prologue", "worker_extra_args"]


@few
@given(st.sampled_from(["local", "slurm", "pbs"]), pairs(OPTION_NAMES, yaml_like), numbers)
@example("slurm", "scheduler_options=3", "1")
@example("slurm", "job_script_prologue=3", "1")
@example("pbs", "worker_extra_args=3", "1")
def test_any_text_in_options_and_workers_can_be_shown_or_is_refused(name, text, workers):
    with environment(OPTIONS=text):
        value_or_error(describe, name, workers)


@few
@given(st.one_of(typed, numbers))
def test_any_text_in_workers_gives_a_number_or_an_error(text):
    count = value_or_error(number_of_workers, text)
    assert count is None or 1 <= count <= 10_000
