"""Adapters as publications: names, what is refused, and what they add to weights."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.conf.errors import WeightError
from penstock.conf.trainer import LoraConfig
from penstock.workers.rollout.engine_hf import MergedAdapters
from penstock.workers.weights.publication.adapter import (
    adapted_layers,
    adapter_layout,
    layer_shapes,
    peft_config,
    published_factors,
    tensor_name,
)
from penstock.workers.weights.publication.layout import compute_layout
from penstock.workers.weights.publication.publication_files import Manifest, MappedWeights
from tests.publications import write_publication

CONFIG = LoraConfig(rank=2, alpha=6, publish="adapter")
LAYER = "model.layers.0.self_attn.q_proj"


def manifest_of(**shapes: list[int]) -> Manifest:
    """Manifest of a file with these tensors: `A`, `B` of `LAYER`, or others by name."""
    names = {tensor_name(LAYER, name) if name in "AB" else name: shape for name, shape in shapes.items()}
    layout = compute_layout((name, shape, "float32") for name, shape in names.items())
    return Manifest(Path("/somewhere"), 3, layout, ())


def test_tensors_have_the_names_that_peft_gives_them() -> None:
    assert tensor_name(LAYER, "A") == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def test_a_layers_shape_is_that_of_its_weight() -> None:
    assert layer_shapes(manifest_of(A=[2, 5], B=[7, 2]), CONFIG) == {LAYER: (7, 5)}


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (manifest_of(A=[2, 5]), rf"has only one of A and B of '{LAYER}'"),
        (manifest_of(B=[7, 2]), r"has only one of A and B"),
        (manifest_of(A=[4, 5], B=[7, 4]), r"A \[4, 5\] and B \[7, 4\] .* are not of rank 2, .*trainer\.lora\.rank"),
        (manifest_of(A=[2, 5], B=[7, 3]), r"are not of rank 2"),
        (manifest_of(A=[2], B=[7, 2]), r"are not of rank 2"),
        (
            manifest_of(**{f"{LAYER}.weight": [7, 5]}),
            rf"has '{LAYER}\.weight', which is no part of an adapter, .*trainer\.lora\.publish",
        ),
    ],
)
def test_what_is_no_adapter_of_that_rank_is_refused(manifest: Manifest, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        layer_shapes(manifest, CONFIG)


def test_a_weight_changes_by_the_scaled_product(tmp_path: Path) -> None:
    a, b = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]]), torch.tensor([[1.0, 1.0], [0.0, 2.0]])
    publication = write_publication(tmp_path, 1, [(tensor_name(LAYER, "A"), a), (tensor_name(LAYER, "B"), b)])
    lm = nn.Sequential()
    lm.add_module("q_proj", nn.Linear(3, 2, bias=False))
    own = lm.q_proj.weight
    adapters = MergedAdapters(lm, None)
    adapters.use("")
    adapters.publish("", {"q_proj": published_factors(MappedWeights(publication))[LAYER]}, 3.0)
    change = 3.0 * torch.tensor([[1.0, 1.0, 3.0], [0.0, 2.0, 2.0]])
    assert torch.equal(lm.q_proj.weight, own + change)
    adapters.use(None)
    assert lm.q_proj.weight is own


def of_policies(**layers: tuple[str, ...]) -> Manifest:
    """Manifest of adapters of these layers, by policy."""
    names = [
        f"{policy}/{tensor_name(layer, letter)}" for policy, of in layers.items() for layer in of for letter in "AB"
    ]
    return Manifest(Path("/somewhere"), 3, compute_layout((name, [2, 2], "float32") for name in names), ())


def test_each_policy_has_the_same_layers_in_a_publication() -> None:
    manifest = of_policies(solver=("x", "y.z"), proposer=("x", "y.z"))
    assert layer_shapes(manifest, CONFIG, ("proposer", "solver")) == {"x": (2, 2), "y.z": (2, 2)}


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (of_policies(solver=("x",), proposer=("y",)), r"its policies have adapters of different layers"),
        (of_policies(solver=("x",)), r"its policies have adapters of different layers"),
        (of_policies(solver=("x",), proposer=("x",), judge=("x",)), r"has 'judge/.*of none of the policies solver and"),
        (manifest_of(A=[2, 5], B=[7, 2]), r"has 'base_model\..* of none of the policies solver and proposer"),
    ],
)
def test_what_is_not_of_these_policies_is_refused(manifest: Manifest, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        layer_shapes(manifest, CONFIG, ("solver", "proposer"))


def test_a_publication_of_policies_is_none_of_one() -> None:
    with pytest.raises(WeightError, match=r"has 'solver/.*no part of an adapter"):
        layer_shapes(of_policies(solver=("x",)), CONFIG)


NAMES = st.lists(
    st.from_regex(r"[a-z]{1,4}(\.[a-z0-9_]{1,6}){0,3}", fullmatch=True), min_size=1, max_size=6, unique=True
)
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9))


@given(st.data(), NAMES, st.integers(1, 5), st.sampled_from(["float32", "bfloat16"]))
def test_the_layout_of_any_layers_is_read_as_these_layers(
    data: st.DataObject, names: list[str], rank: int, dtype: str
) -> None:
    shapes = {name: data.draw(SIZES) for name in names}
    config = LoraConfig(rank=rank)
    manifest = Manifest(Path("/somewhere"), 1, adapter_layout(shapes, config, dtype), ())
    assert layer_shapes(manifest, config) == shapes


@pytest.mark.parametrize(
    ("targets", "written"), [(["all-linear"], "all-linear"), (["q_proj"], ["q_proj"]), (["q", "v"], ["q", "v"])]
)
def test_pefts_configuration_says_rank_scale_and_targets(targets: list[str], written: object) -> None:
    from peft import LoraConfig as PeftConfig

    fields = peft_config(LoraConfig(rank=4, alpha=12, target_modules=targets))
    assert (fields["r"], fields["lora_alpha"], fields["target_modules"]) == (4, 12, written)
    assert PeftConfig.from_peft_type(**fields).r == 4


def test_adapters_of_a_model_that_sees_are_around_its_text_alone(vision_model: Path) -> None:
    """Engines ask for their shapes before they have read any weights."""
    shapes = adapted_layers(str(vision_model), LoraConfig(rank=2, publish="adapter"))
    assert shapes["model.language_model.layers.0.mlp.down_proj"] == (64, 128)
    assert not [name for name in shapes if "language_model" not in name]
    assert len(shapes) == 2 * 7
