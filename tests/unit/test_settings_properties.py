"""Whatever a person types into a variable is a value or one clear `Error`, nothing else."""

import math
import os
from contextlib import contextmanager

from hypothesis import HealthCheck, example, given
from hypothesis import settings as how
from hypothesis import strategies as st

from ddp_common import Error, settings
from ddp_common.clusters.connect import describe
from ddp_common.clusters.profiles import number_of_workers, read_profile
from ddp_common.commands.scaling import numbers_of_ranks

DEFAULTS = dict(
    epochs=3, seed=0, learning_rate=1e-3, held_out=0.15, layers=2, shuffle=True, name="small"
)
LIMITS = {"held_out": (0.01, 0.45), "layers": (None, 16)}
few = how(
    max_examples=int(os.environ.get("EXAMPLES", 60)),
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
numbers = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        [
            "",
            "0",
            "-1",
            "1e9",
            "1_0",
            "nan",
            "inf",
            "-inf",
            "1e400",
            "9" * 400,
            "9" * 5000,
            "0x10",
            "०",
            "1.5",
            " 1",
            "null",
            "true",
            "[1]",
            ".inf",
            ".nan",
        ]
    ),
)
yaml_like = st.one_of(
    numbers,
    typed,
    st.sampled_from(
        [
            "[1",
            "{a: 1",
            "!!python/object/apply:os.system [true]",
            "!!timestamp x",
            "!!int x",
            "!!bool x",
            "!!binary x",
            "!!float x",
            "&a [*a]",
            "*a",
            "{[1]: 2}",
            "2026-99-99",
            "[" * 3000,
            "12:00:00",
            "!!set {1}",
            "? x",
            "a: b: c",
            "\t",
            "%",
            "<<: 1",
            "{<<: 1}",
            "02:00:00",
        ]
    ),
)


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


@few
@given(
    st.sampled_from(["PRESET", "RESTARTS", "RESUME", "CHECKPOINT"]),
    st.one_of(typed.filter(lambda text: "://" not in text), numbers),
)
def test_any_text_in_the_other_variables_gives_settings_or_an_error(variable, text):
    with environment(**{variable: text}):
        value_or_error(lambda: settings("demo", **DEFAULTS))


PROFILE_NAMES = ["local", "slurm", "pbs", "saturn", "tcp://127.0.0.1:1"]
OPTION_NAMES = [
    "workers",
    "timeout",
    "warning",
    "gpu_cluster",
    "cores",
    "processes",
    "memory",
    "walltime",
    "queue",
    "cores.x",
    "scheduler_options.interface",
    ".",
    "a..b",
    "threads_per_worker",
    "job_script_prologue",
    "worker_extra_args",
    "scheduler_options",
]


@few
@given(st.sampled_from(PROFILE_NAMES), pairs(OPTION_NAMES, yaml_like))
@example("slurm", "processes=two")
@example("slurm", "cores.x=3")
@example("local", "x=[1")
@example("local", "workers=.inf")
def test_any_text_in_options_gives_a_profile_or_an_error(name, text):
    profile = value_or_error(read_profile, name, text)
    if profile is not None:
        value_or_error(number_of_workers, profile["workers"])
        assert isinstance(profile["options"], dict) and profile["timeout"] >= 0


@few
@given(st.sampled_from(["local", "slurm", "pbs"]), pairs(OPTION_NAMES, yaml_like), numbers)
@example("slurm", "scheduler_options=3", "1")
@example("slurm", "job_script_prologue=3", "1")
@example("pbs", "worker_extra_args=3", "1")
def test_any_text_in_options_and_workers_can_be_shown_or_is_refused(name, text, workers):
    with environment(OPTIONS=text):
        value_or_error(describe, name, workers)


@few
@given(
    st.one_of(
        typed,
        typed.map("{}.yaml".format),
        st.sampled_from(
            [
                "~nobody.yaml",
                "a" * 300,
                "a" * 300 + ".yaml",
                "/",
                ".",
                "..",
                "://",
                "/dev/null.yaml",
                "clusters",
            ]
        ),
    )
)
def test_any_text_in_cluster_gives_a_profile_or_an_error(name):
    value_or_error(read_profile, name, "")


@few
@given(st.one_of(typed, numbers))
def test_any_text_in_workers_gives_a_number_or_an_error(text):
    count = value_or_error(number_of_workers, text)
    assert count is None or 1 <= count <= 10_000
    value_or_error(numbers_of_ranks, text)
