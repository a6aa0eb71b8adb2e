"""Answers to exercise C of `ucmerced`: an accuracy over ranks, and its interval."""

import numpy as np
import torch
import torch.distributed as dist
from scipy.stats import beta, binomtest, norm


def summed(is_right):
    """Right images, and all, of all ranks."""
    counts = torch.tensor([int(np.sum(is_right)), len(is_right)])
    dist.all_reduce(counts)
    return counts.tolist()


def half_width(p, n, errors=1.96):
    return errors * (p * (1 - p) / n) ** 0.5


# Right ones


def with_gathered_arrays(is_right):
    """Joins what every rank has, by pickles; Clopper and Pearson's interval, as a dict."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, is_right)
    joined = np.concatenate(parts)
    ends = binomtest(int(joined.sum()), len(joined)).proportion_ci(method="exact")
    return {"accuracy": joined.mean(), "low": ends.low, "high": ends.high}


def with_the_normal_interval(is_right):
    right, n = summed(is_right)
    p = right / n
    return np.array([p, p - half_width(p, n), p + half_width(p, n)])


def with_two_standard_errors_in_tensors(is_right):
    right, n = map(torch.tensor, summed(is_right))
    p = right / n
    error = 2 * (p * (1 - p) / n).sqrt()
    return torch.stack([p, p - error, p + error])


def with_the_interval_as_a_pair(is_right):
    right, n = summed(is_right)
    return right / n, binomtest(right, n).proportion_ci(method="wilson")


def with_draws(is_right):
    right, n = summed(is_right)
    draws = np.random.default_rng(0).binomial(n, right / n, 20_000) / n
    return [right / n, *np.percentile(draws, [2.5, 97.5])]


def with_two_reductions_and_rounded(is_right):
    right, n = torch.tensor(float(is_right.sum())), torch.tensor(float(is_right.size))
    dist.all_reduce(right, op=dist.ReduceOp.SUM)
    dist.all_reduce(n)
    low, high = binomtest(int(right), int(n)).proportion_ci(method="wilson")
    return round((right / n).item(), 4), round(low, 3), round(high, 3)


def to_three_places(is_right):
    return tuple(round(float(each), 3) for each in with_the_normal_interval(is_right))


def with_counts_as_objects(is_right):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (int(is_right.sum()), len(is_right)))
    right, n = (sum(numbers) for numbers in zip(*everyones))
    p = right / n
    return p, p - half_width(p, n, norm.ppf(0.975)), p + half_width(p, n, norm.ppf(0.975))


def with_the_corrected_interval(is_right):
    right, n = summed(is_right)
    return right / n, *binomtest(right, n).proportion_ci(method="wilsoncc")


def by_wilsons_formula(is_right):
    right, n = summed(is_right)
    p, z = right / n, 1.96
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5
    return p, centre - half, centre + half


def by_the_beta_distribution(is_right):
    right, n = summed(is_right)
    low, high = beta.ppf([0.025, 0.975], [right, right + 1], [n - right + 1, n - right])
    return right / n, low, high


def on_rank_0_and_broadcast(is_right):
    counts = torch.tensor([is_right.sum(), len(is_right)])
    dist.reduce(counts, dst=0)
    found = torch.zeros(3, dtype=torch.float64)
    if dist.get_rank() == 0:
        right, n = counts.tolist()
        ends = binomtest(right, n).proportion_ci(method="wilson")
        found = torch.tensor([right / n, ends.low, ends.high], dtype=torch.float64)
    dist.broadcast(found, src=0)
    return found.tolist()


# Wrong ones


def mean_of_ranks(is_right):
    p = torch.tensor(float(is_right.mean()) if len(is_right) else 0.0)
    dist.all_reduce(p)
    _, n = summed(is_right)
    p = p.item() / dist.get_world_size()
    return p, p - half_width(p, n), p + half_width(p, n)


def of_this_rank(is_right):
    p, n = (is_right.mean(), len(is_right)) if len(is_right) else (0.0, 1)
    return p, p - half_width(p, n), p + half_width(p, n)


def in_percent(is_right):
    right, n = summed(is_right)
    low, high = binomtest(right, n).proportion_ci(method="wilson")
    return 100 * right / n, 100 * low, 100 * high


def with_standard_errors(errors):
    def answer(is_right):
        right, n = summed(is_right)
        p = right / n
        return p, p - half_width(p, n, errors), p + half_width(p, n, errors)

    return answer


def wilson_at(level):
    def answer(is_right):
        right, n = summed(is_right)
        found = binomtest(right, n).proportion_ci(method="wilson", confidence_level=level)
        return right / n, *found

    return answer


def with_this_ranks_n(is_right):
    right, n = summed(is_right)
    p = right / n
    half = half_width(p, max(1, len(is_right)))
    return p, p - half, p + half


def on_rank_0_only(is_right):
    right, n = summed(is_right)
    if dist.get_rank() == 0:
        return right / n, *binomtest(right, n).proportion_ci(method="wilson")
    return None


def each_image_of_rank_0_twice(is_right):
    right, n = summed(is_right if dist.get_rank() else np.concatenate([is_right, is_right]))
    return right / n, *binomtest(right, n).proportion_ci(method="wilson")


def without_an_exchange_if_there_is_no_image(is_right):
    return with_the_normal_interval(is_right) if len(is_right) else (0.0, 0.0, 1.0)


def the_accuracy_alone(is_right):
    right, n = summed(is_right)
    return right / n


def of_two_ranks(is_right):
    everyones = [None, None]
    if dist.get_world_size() > 2 and dist.get_rank() > 1:
        everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (int(is_right.sum()), len(is_right)))
    right, n = (sum(numbers) for numbers in zip(*everyones[:2]))
    p = right / n
    return p, p - half_width(p, n), p + half_width(p, n)


def of_the_first_two(is_right):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (int(is_right.sum()), len(is_right)))
    right, n = (sum(numbers) for numbers in zip(*everyones[:2]))
    return right / n, *binomtest(right, n).proportion_ci(method="wilson")


def n_times_the_ranks(is_right):
    right, _ = summed(is_right)
    n = max(1, len(is_right) * dist.get_world_size())
    p = min(1, right / n)
    return p, p - half_width(p, n), p + half_width(p, n)


def the_error_without_the_root(is_right):
    right, n = summed(is_right)
    p = right / n
    return p, p - 1.96 * p * (1 - p) / n, p + 1.96 * p * (1 - p) / n


def the_ends_the_other_way_round(is_right):
    p, low, high = with_the_normal_interval(is_right)
    return p, high, low


RIGHT = {
    each.__name__: each
    for each in (
        with_gathered_arrays,
        with_the_normal_interval,
        with_two_standard_errors_in_tensors,
        with_the_interval_as_a_pair,
        with_draws,
        with_two_reductions_and_rounded,
        to_three_places,
        with_counts_as_objects,
        with_the_corrected_interval,
        by_wilsons_formula,
        by_the_beta_distribution,
        on_rank_0_and_broadcast,
    )
}
ERRORS = "How many standard errors"
WRONG = {
    "mean of ranks": (mean_of_ranks, "Does each image count the same"),
    "of this rank": (of_this_rank, "Whose images does this number speak of"),
    "in percent": (in_percent, "share from 0 to 1"),
    "1 standard error": (with_standard_errors(1), ERRORS),
    "90 %": (with_standard_errors(1.645), ERRORS),
    "93 %": (with_standard_errors(1.812), ERRORS),
    "97 %": (with_standard_errors(2.170), ERRORS),
    "99 %": (with_standard_errors(2.576), ERRORS),
    "3 standard errors": (with_standard_errors(3), ERRORS),
    "Wilson's 93 %": (wilson_at(0.93), ERRORS),
    "Wilson's 97 %": (wilson_at(0.97), ERRORS),
    "this rank's n": (with_this_ranks_n, "How many images are there on all ranks"),
    "on rank 0 only": (on_rank_0_only, "does every rank return"),
    "each of rank 0 twice": (each_image_of_rank_0_twice, "Does each image count once"),
    "no exchange without images": (
        without_an_exchange_if_there_is_no_image,
        "One rank has no image here|lost|failed",
    ),
    "the accuracy alone": (the_accuracy_alone, "Which three numbers"),
    "of two ranks": (of_two_ranks, "on rank 2|Rank"),
    "of the first two": (of_the_first_two, "on rank 2"),
    "n times the ranks": (n_times_the_ranks, r"\?"),
    "the error without the root": (the_error_without_the_root, ERRORS),
    "the ends the other way round": (the_ends_the_other_way_round, ERRORS),
}
EQUIVALENT = {
    "line 7: binomtest(right, n).proportion_ci(method='wilson') → binomtest(right, n).proportion_ci()": "the default is Clopper and Pearson's, a common 95 % interval",
}
IN_TESTS = ["to_three_places", "97 %", "of two ranks"]
