"""Which samples the ranks get, together: launched on one, two, three and four ranks."""

import sys

import cloudpickle
import numpy as np
import pytest
import torch.distributed as dist

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LENGTH, BATCH, SIZES = 103, 16, (1, 2, 3, 4)
EVALUATED = (23, 2)  # 2: fewer samples than ranks


def gather(mine):
    everyone = [None] * ddp.world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def deal(length, batch_size, epochs, state=None, stop=None):
    """Per rank, (epoch, indices, weight) of each step; and the position after the last."""
    sampler = ddp.ElasticSampler(length, batch_size, seed=7)
    if state is not None:
        sampler.load_state_dict(state)
    dealt = []
    for epoch in sampler.epochs(epochs):
        for indices in sampler:
            dealt.append((epoch, indices, sampler.weight))
            if len(dealt) == stop:
                return gather(dealt), sampler.state_dict()
    return gather(dealt), sampler.state_dict()


def evaluate(lengths):
    return [
        gather([index for batch in ddp.EvalSampler(length, 5) for index in batch])
        for length in lengths
    ]


def splits():
    return gather([part.tolist() for part in ddp.split(103, [0.1, 0.2])])


def on_ranks(client, size, function, **arguments):
    return ddp.launch(client, function, workers=size, **arguments).result


@pytest.fixture(scope="module")
def dealt(client, tmp_path_factory):
    """world size -> what each rank was dealt in two epochs."""
    return {
        size: ddp.launch(
            client,
            deal,
            workers=size,
            directory=tmp_path_factory.mktemp("run"),
            length=LENGTH,
            batch_size=BATCH,
            epochs=2,
        ).result[0]
        for size in SIZES
    }


def batches(ranks):
    """The global batch of each step, as a sorted list: what the ranks with a weight got."""
    return [
        sorted(index for _, indices, weight in step if weight for index in indices)
        for step in zip(*ranks)
    ]


def test_each_step_has_the_same_samples_on_any_number_of_ranks(dealt):
    assert len(batches(dealt[1])) == 2 * 7
    for size in SIZES[1:]:
        assert batches(dealt[size]) == batches(dealt[1])


def test_together_the_ranks_get_every_sample_once_per_epoch(dealt):
    for ranks in dealt.values():
        for epoch in (0, 1):
            samples = [
                index
                for rank in ranks
                for at, indices, weight in rank
                if at == epoch and weight
                for index in indices
            ]
            assert sorted(samples) == list(range(LENGTH))


def test_the_epochs_differ(dealt):
    assert batches(dealt[2])[:7] != batches(dealt[2])[7:]


def test_weights_average_to_one_and_weigh_every_sample_the_same(dealt):
    for size, ranks in dealt.items():
        for step in zip(*ranks):
            assert np.isclose(np.mean([weight for _, _, weight in step]), 1)
            influences = [weight / len(indices) for _, indices, weight in step if weight]
            assert np.allclose(influences, size / sum(len(indices) for _, indices, _ in step))


def test_a_rank_whose_share_is_empty_takes_part_with_one_sample_of_weight_zero(client):
    # the last batch has two samples
    ranks, _ = on_ranks(client, 3, deal, length=10, batch_size=4, epochs=1)
    *_, last = zip(*ranks)
    assert [(len(indices), weight) for _, indices, weight in last] == [
        (1, 1.5),
        (1, 1.5),
        (1, 0.0),
    ]
    (_, first, _), _, (_, extra, _) = last
    assert extra == first  # of the same batch
    assert sorted(sum(batches(ranks), [])) == list(range(10))


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (2, 3), (2, 2)])
def test_a_run_that_resumes_in_an_epoch_goes_on_with_exactly_the_next_steps(
    client, dealt, before, after
):
    begun, state = on_ranks(
        client, before, deal, length=LENGTH, batch_size=BATCH, epochs=2, stop=4
    )
    resumed, _ = on_ranks(
        client, after, deal, length=LENGTH, batch_size=BATCH, epochs=2, state=state
    )
    assert batches(begun) + batches(resumed) == batches(dealt[1])


def test_a_position_of_another_run_ends_the_run_with_the_reason(client):
    _, state = on_ranks(client, 1, deal, length=LENGTH, batch_size=BATCH, epochs=2, stop=4)
    with pytest.raises(ddp.RankFailed, match="batch_size 16 there, 8 here"):
        on_ranks(client, 2, deal, length=LENGTH, batch_size=8, epochs=2, state=state)


def test_evaluation_counts_every_sample_once_on_any_number_of_ranks(client):
    for size in SIZES:
        many, few = on_ranks(client, size, evaluate, lengths=EVALUATED)
        assert sorted(sum(many, [])) == list(range(23))
        assert sorted(sum(few, [])) == [0, 1]
        assert sum(not share for share in few) == max(0, size - 2)


def test_a_split_is_the_same_on_every_rank_and_on_the_client(client):
    of_client = [part.tolist() for part in ddp.split(103, [0.1, 0.2])]
    assert on_ranks(client, 3, splits) == [of_client] * 3
