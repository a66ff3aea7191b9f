"""DeepSpeed's engine on fake GPUs: ranks 0 and 7 of 8, two micro-batches an update."""

from collections import Counter

import pytest

from pretrain.config.deepspeed import DS_CONFIGS

pytestmark = pytest.mark.rehearsal
NAMES = sorted(file.stem for file in DS_CONFIGS.glob("*.json"))
CASES = [("flex", name) for name in NAMES] + [("dense", "zero1_bf16"), ("dense", "zero3_bf16")]
"""Attention back end and configuration."""
RECIPES = {
    "flex": ["pile-base-fast", "model.variant=zero-clap"],
    "dense": ["pile-base", "model.variant=zero-clap"],
}
"""By back end: one that a new run takes, and one as published."""
RANKS, WORLD_SIZE, LAYERS = (0, 7), 8, 3
WAITS = {"engine._reduce": 1, "is_invalid_grad_norm": 1, "has_overflow": 1}
"""Places where the host waits in an update, and how often: for the sums of the ranks, and in
DeepSpeed for the norm and for an overflow."""
OFFLOAD_WAITS = {
    "update_offload_overflow_tracker",
    "has_overflow",
    "complete_grad_norm_calculation_for_cpu_offload",
}
"""Where DeepSpeed waits for each parameter of a rank, with the optimizer in host memory."""
SYNCHRONISATIONS = {
    "stage_1_and_2._wait_for_offload_copies",
    "stage3.independent_gradient_partition_epilogue",
    "partition_parameters._allgather_params_coalesced",
}
"""Of streams, by DeepSpeed with offload or at stage 3."""
BLOCKING = {"engine.step", "engine._joined"}
"""Copies to the device that are not begun ahead: a few numbers each, before and after an update."""
DEEPSPEED = "stage", "utils.mask_nan_or_inf_with_val_inplace"
"""Modules of DeepSpeed that copy single numbers between its own steps."""
CLOSE = 0.1
"""Largest difference of the peak from the plan, as a share."""


@pytest.fixture(scope="module")
def updates(rehearse, table):
    """By back end and configuration: the second update of each of RANKS."""
    settings = [f"model.overrides.num_layers={LAYERS}"]
    settings += ["batch.global_batch_size=256", "training.compile=false"]
    found = {}
    for backend, recipe in RECIPES.items():
        names = [name for of, name in CASES if of == backend]
        words = WORLD_SIZE, *recipe, *settings, "--", *names
        of_ranks = rehearse(*(["engine", rank, *words] for rank in RANKS))
        found |= {(backend, lines[0]["name"]): lines for lines in zip(*of_ranks, strict=True)}
    lines = (
        f"{backend:5}  {name:18}  {sum(last['waits'].values()):2} waits, "
        f"{len(of['collectives']):2} collectives, {of['peak'] / 1e9:5.2f} GB, "
        f"{of['peak'] / of['planned']:.2f} of the plan  {of['seconds']:4.1f} s"
        for (backend, name), (of, last) in found.items()
        if "error" not in of
    )
    table(
        f"zero-clap, base with {LAYERS} layers: an update of 2 x 16 x 2048 on ranks 0 and 7 of 8",
        lines,
    )
    return found


@pytest.fixture(params=CASES, ids=" ".join)
def update(request, updates):
    """The update of rank 0, and of the last rank."""
    for of_rank in updates[request.param]:
        assert "error" not in of_rank, of_rank["error"]
    return updates[request.param]


def test_ranks_call_the_same_collectives_in_the_same_order(update):
    first, last = update
    assert first["collectives"] == last["collectives"] != []


def test_the_host_waits_where_it_is_known_to(update):
    for of_rank in update:
        waits = Counter()
        for place, count in of_rank["waits"].items():
            waits[next((name for name in WAITS if name in place), place)] += count
        if "offload" in of_rank["name"]:
            waits -= {p: n for p, n in waits.items() if any(name in p for name in OFFLOAD_WAITS)}
        assert waits <= Counter(WAITS)
        assert {place.split(" < ")[0] for place in of_rank["synchronisations"]} <= SYNCHRONISATIONS


def test_no_copy_to_the_device_stops_the_host_but_those_that_are_known(update):
    for of_rank in update:
        places = {place.split(" < ")[0] for place in of_rank["blocking"]}
        assert {name for name in places if not name.startswith(DEEPSPEED)} <= BLOCKING


def test_the_peak_of_memory_is_what_plan_says(update):
    for of_rank in update:
        assert of_rank["peak"] == pytest.approx(of_rank["planned"], rel=CLOSE)
