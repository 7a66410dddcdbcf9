"""MixUp and CutMix: what no client has to be asked. Parity with torchvision and timm: test_data_vision.py."""

import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, default_collate

import forked
from cases import Draw
from refusals import assert_refused
from sparse_ce import SparseTarget, cross_entropy
from sparse_ce.data import CutMix, FastCollateMixup, MixUp, Mixup, SmoothedTarget, cutmix, mixup

CLASSES = 7


class Drawn:
    """A generator of NumPy's kind that says what it is told; its shares are ``lam``, its boxes in the middle."""

    def __init__(self, lam):
        self.lam = lam

    def rand(self, size=None):
        return np.zeros(size) if size else 0.0

    def beta(self, a, b, size=None):
        return np.resize(self.lam, size) if size else self.lam

    def randint(self, low, high):
        return (low + high) // 2


@pytest.fixture
def images(device):
    return Draw(device).uniform(6, 3, 8, 10)


@pytest.fixture
def labels(device):
    return torch.tensor([3, 3, 0, 6, 1, 5], device=device)


def mixing(lam, mode="elem", **options):
    options = dict(label_smoothing=0.0, num_classes=CLASSES, mode=mode, generator=Drawn(lam), **options)
    return Mixup(**options)


@pytest.mark.parametrize("mix", [mixup, cutmix])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_has_no_part_in_labels_of_other_16_bits(half, mix, images, device):
    other = torch.float16 if half == torch.bfloat16 else torch.bfloat16
    draw = Draw(device)
    labels = SparseTarget.from_topk(draw.integers(CLASSES, 6, 2), draw.uniform(6, 2).to(other))
    expected = mix(images, labels, generator=torch.Generator().manual_seed(3))
    with torch.autocast(device, half):
        found = mix(images, labels, generator=torch.Generator().manual_seed(3))
    assert torch.equal(found[0], expected[0]) and found[1].equal(expected[1])


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("mode", ["elem", "pair", "batch"])
def test_an_odd_batch_mixes_its_middle_row_with_itself(mode, cut, device):
    images, labels = Draw(device).uniform(5, 3, 8, 10), torch.tensor([3, 1, 0, 6, 1], device=device)
    mixed, target = mixing(0.25, mode, mixup_alpha=float(not cut), cutmix_alpha=float(cut))(images, labels)
    assert target.to_dense()[2].tolist() == [1, 0, 0, 0, 0, 0, 0]
    torch.testing.assert_close(mixed[2], images[2])
    assert not torch.equal(mixed[0], images[0]) and target.indices[:, 1].tolist() == labels.flip(0).tolist()


def test_each_row_has_its_own_share_and_is_left_alone_where_it_is_all(images, labels):
    """NaN of a partner without a share comes nowhere."""
    lam = [1.0, 0.25, 0.0, 0.5, 0.75, 1.0]
    images[5] = torch.nan
    mixed, target = mixing(lam)(images, labels)
    shares = torch.tensor(lam, device=images.device)
    one_hot = F.one_hot(labels, CLASSES)
    torch.testing.assert_close(target.to_dense(), shares[:, None] * one_hot + (1 - shares)[:, None] * one_hot.flip(0))
    assert torch.equal(mixed[0], images[0]) and mixed[5].isnan().all()
    torch.testing.assert_close(mixed[1:5], shares[1:5, None, None, None] * images[1:5]
                               + (1 - shares)[1:5, None, None, None] * images[1:5].flip(0))


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_the_weights_are_those_of_the_images(name, device):
    """Of images that are all 0 and all 1: by the mean of each."""
    function = dict(mixup=mixup, cutmix=cutmix)[name]
    labels = torch.tensor([3, 5], device=device)
    images = torch.tensor([0.0, 1.0], device=device)[:, None, None, None].expand(2, 1, 12, 10)
    seen = set()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        mixed, target = function(images, labels, 0.7, num_classes=CLASSES, generator=generator)
        assert target.indices.tolist() == ([[3, 5], [5, 3]] if target.values[0, 1] else [[3, 3], [5, 5]])
        torch.testing.assert_close(mixed.mean((1, 2, 3)), torch.stack((target.values[0, 1], target.values[1, 0])))
        seen.add(round(target.values[0, 0].item(), 3))
        again = function(images, labels, 0.7, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(again[0], mixed) and torch.equal(again[1].values, target.values)
    assert len(seen) > 10 and min(seen) < 0.5 and max(seen) > 0.7


@pytest.mark.parametrize("ignore_index", [-100, 255, 0])
def test_ignored_labels_add_nothing_and_two_of_them_are_ignored(ignore_index, images, device):
    labels = torch.tensor([ignore_index, ignore_index, 2, ignore_index, 5, 6], device=device)
    logits = Draw(device).normal(6, CLASSES)
    _, target = mixup(images, labels, 1.0, ignore_index=ignore_index, generator=torch.Generator().manual_seed(3))
    lam = target.values[0, 0].item()
    assert target.ne(-100).tolist() == [True, False, True, True, True, True] and 0.05 < lam < 0.95
    own = F.cross_entropy(logits, labels, reduction="none", ignore_index=ignore_index)
    other = F.cross_entropy(logits, labels.roll(1), reduction="none", ignore_index=ignore_index)
    torch.testing.assert_close(cross_entropy(logits, target, reduction="none"), lam * own + (1 - lam) * other)


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_a_label_without_a_share_does_not_say_whether_its_row_is_ignored(lam, images, device):
    labels = torch.tensor([-100, 1, 2, 3, 4, 5], device=device)
    _, target = mixing(lam, "elem")(images, labels)
    ignored = 0 if lam else 5
    assert target.ne(-100).tolist() == [row != ignored for row in range(6)]
    expected = F.one_hot(labels.clamp(min=0) if lam else labels.flip(0).clamp(min=0), CLASSES).float()
    expected[ignored] = 0
    torch.testing.assert_close(target.to_dense(), expected)


def soft_labels(device):
    dense = torch.zeros(6, CLASSES)
    dense[0, [1, 3]] = torch.tensor([0.25, 0.75])
    dense[1, 6], dense[3, [0, 1, 2]], dense[4, 5], dense[5, 3] = 1.0, 0.5, -2.0, 1.0
    indices = torch.tensor([[1, 3, 9], [6, 0, 0], [8, 8, 8], [0, 1, 2], [5, -100, -100], [3, 0, 0]])
    values = torch.tensor([[0.25, 0.75, 0], [1, 0, 0], [0, 0, 0], [0.5, 0.5, 0.5], [-2, 3, 3], [1, 0, 0]])
    dense, indices, values = dense.to(device), indices.to(device), values.to(device)
    kept = dense.clamp(min=0)
    return {"topk": (SparseTarget.from_topk(indices, values), dense), "pair": ((indices, values), dense),
            "coo": (dense.to_sparse(), dense), "csr": (dense.to_sparse_csr(), dense), "dense": (dense, dense),
            "jagged": (SparseTarget.from_dense(dense), dense),
            "logprobs": (SparseTarget.from_dense(kept).log_probs(), kept),
            "ids": (SparseTarget.from_dense(kept.bool().long()), kept.bool().float()),
            "index": (SparseTarget.from_index(dense.argmax(1)), F.one_hot(dense.argmax(1), CLASSES).float())}


@pytest.mark.parametrize("form", soft_labels("cpu"))
def test_soft_labels_have_the_entries_of_both(form, images, device):
    given, dense = soft_labels(device)[form]
    for function in (mixup, cutmix):
        _, target = function(images, given, num_classes=CLASSES, generator=torch.Generator().manual_seed(7))
        _, of_labels = function(images, torch.zeros(6, dtype=torch.int64, device=device),
                                generator=torch.Generator().manual_seed(7))
        lam, rest = of_labels.values[0].tolist()
        assert 0.05 < lam < 0.95 and target.values.dtype == torch.float32
        torch.testing.assert_close(target.to_dense(), lam * dense + rest * dense.roll(1, 0))
        assert target.ne(-100).all()  # a row without entries counts
        assert target.indices.shape[1] == 2 * {"index": 1}.get(form, 3)


@pytest.mark.parametrize("lam", [0.0, 0.25, 1.0])
def test_masked_rows_of_soft_labels_are_ignored(lam, images, device):
    given, dense = soft_labels(device)["topk"]
    for target in (given, SparseTarget.from_dense(dense)):
        mask = torch.tensor([True, False, True, True, False, True], device=device)
        masked = SparseTarget(target.indices, target.values, target.offsets, mask, CLASSES)
        _, mixed = mixing(lam)(images, masked)
        counts = {0.0: mask.flip(0), 0.25: mask | mask.flip(0), 1.0: mask}[lam]
        assert mixed.ne(-100).tolist() == counts.tolist()
        kept = dense * mask[:, None]
        torch.testing.assert_close(mixed.to_dense(), lam * kept + (1 - lam) * kept.flip(0))


@pytest.mark.parametrize("transform", [MixUp, CutMix])
def test_transforms_are_their_functions(transform, images, labels, device):
    """Of labels in any form, which are found as one."""
    function = dict(MixUp=mixup, CutMix=cutmix)[transform.__name__]
    for given in (labels, *(given for given, _ in soft_labels(device).values())):
        ours = transform(alpha=0.7, num_classes=CLASSES, generator=torch.Generator().manual_seed(5))
        expected, target = function(images, given, 0.7, num_classes=CLASSES,
                                    generator=torch.Generator().manual_seed(5))
        for mixed, mixed_target in (ours(images, given), transform(
                alpha=0.7, num_classes=CLASSES, generator=torch.Generator().manual_seed(5))({
                    "image": images, "label": given}).values()):
            assert torch.equal(mixed, expected) and mixed_target.equal(target)


def test_uint8_images_are_rounded(device):
    labels = torch.tensor([0, 1, 2, 3], device=device)
    images = Draw(device).integers(256, 4, 3, 5, 6).to(torch.uint8)
    mixed, target = mixup(images, labels, generator=torch.Generator().manual_seed(1))
    lam, rest = target.values[0].double()
    exact = lam * images.double() + rest * images.roll(1, 0).double()
    assert mixed.dtype == torch.uint8 and (mixed.double() - exact).abs().max() < 0.501
    mixed, _ = mixing(0.3)(images, labels)
    assert (mixed.double() - (0.3 * images.double() + 0.7 * images.flip(0).double())).abs().max() < 0.501


def test_videos_and_gradients_pass(device):
    images = Draw(device).uniform(4, 2, 3, 5, 6).requires_grad_()
    labels = torch.tensor([0, 1, 2, 3], device=device)
    for transform in (MixUp(), CutMix(), mixing(0.5), mixing(0.5, cutmix_alpha=1.0), mixing(0.5, "batch")):
        mixed, _ = transform(images, labels)
        assert mixed.shape == images.shape
        grad, = torch.autograd.grad(mixed.sum(), images)
        torch.testing.assert_close(grad.sum(), torch.tensor(float(images.numel()), device=device))


def test_nothing_waits_for_a_gpu(device):
    if device == "cpu":
        pytest.skip("there is nothing to wait for")
    images, labels = torch.rand(4, 3, 8, 8, device=device), torch.tensor([3, 1, 4, 1]).to(device)
    transforms = [MixUp(), CutMix(), *(Mixup(cutmix_alpha=1.0, mode=mode) for mode in ("batch", "pair", "elem"))]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for transform in transforms:
            transform(images, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------------ where they are called

class Batches:
    """A ``collate_fn`` as torchvision's page has it, which can be pickled."""

    def __init__(self, transform):
        self.transform = transform

    def __call__(self, samples):
        return self.transform(*default_collate(samples))


@pytest.mark.parametrize("collate_fn", [Batches(MixUp(num_classes=CLASSES)), Batches(CutMix(alpha=0.5)),
                                        Batches(Mixup(cutmix_alpha=1.0, mode="elem", num_classes=CLASSES)),
                                        FastCollateMixup(mode="half", num_classes=CLASSES)])
def test_workers_mix_and_each_draws_its_own(collate_fn):
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randint(256, (3, 32, 32), generator=generator).to(torch.uint8), i % CLASSES) for i in range(32)]
    transform = getattr(collate_fn, "transform", collate_fn)
    if isinstance(transform, (MixUp, Mixup)) and transform is not collate_fn:
        samples = [(image.float(), label) for image, label in samples]
    loader = DataLoader(samples, 8, num_workers=2, collate_fn=pickle.loads(pickle.dumps(collate_fn)))
    targets = [getattr(target, "target", target) for _, target in loader]
    assert len(targets) == 4 and all(target.indices.shape[1] == 2 for target in targets)
    assert len({target.values.double().sum(0)[0].item() for target in targets}) == 4


def test_the_caches_module_needs_no_client(tmp_path):
    done = forked.run("-c", """import sys
class Absent:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in ("pyarrow", "torchvision", "timm", "safetensors", "PIL"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch
from sparse_ce.data import CutMix, Mixup, mixup
Mixup()(*CutMix()(torch.rand(2, 3, 4, 4), torch.tensor([1, 2])))
print(mixup(torch.rand(2, 3, 4, 4), torch.tensor([1, 2]))[1].shape)
""", cwd=tmp_path)
    assert done.stdout.strip() == "torch.Size([2])", done.stderr


# ----------------------------------------------------------------------------------------------------- what is refused

@pytest.mark.parametrize("change,words", [
    (dict(alpha=0), ["alpha", "0"]), (dict(alpha=-1.0), ["alpha", "-1.0"]), (dict(alpha="1"), ["alpha", "'1'"]),
    (dict(alpha=float("nan")), ["alpha", "nan"]), (dict(num_classes=0), ["num_classes", "0"]),
    (dict(num_classes=5.0), ["num_classes", "5.0"]), (dict(generator=3), ["generator", "3"]),
    (dict(images=[1, 2]), ["images", "list"]), (dict(images=torch.zeros(2, 3)), ["images", "[2, 3]"]),
    (dict(images=torch.zeros(3, 3, 4, 4)), ["images", "2", "3"]),
    (dict(labels=torch.tensor([0.5, 1.0])), ["labels", "float32"]), (dict(labels=torch.tensor(1)), ["labels", "[]"]),
    (dict(labels=torch.zeros(2, 1, 1, dtype=torch.int64)), ["labels", "[2, 1, 1]"]),
    (dict(labels="ab"), ["labels", "str"]), (dict(labels=torch.eye(2, 9), num_classes=5), ["num_classes", "9", "5"]),
    (dict(labels=SparseTarget.from_index(torch.zeros(2, 4, dtype=torch.int64))), ["labels", "[2, 4]"]),
], ids=str)
@pytest.mark.parametrize("function", [mixup, cutmix])
def test_wrong_arguments_are_refused(function, change, words):
    given = {"images": torch.rand(2, 3, 4, 4), "labels": torch.tensor([1, 2]), **change}
    assert_refused(lambda: function(**given), *words)


def test_what_cannot_be_blended_is_refused():
    labels, whole = torch.tensor([1, 2]), torch.ones(2, 3, 4, 4, dtype=torch.int32)
    for transform in (mixup, MixUp(), Mixup()):
        assert_refused(lambda: transform(whole, labels), "images", "int32")
    assert cutmix(whole, labels)[0].dtype == torch.int32


@pytest.mark.parametrize("options,words", [
    (dict(mode="half"), ["mode", "'half'"]), (dict(prob=1.5), ["prob", "1.5"]), (dict(switch_prob=-1), ["switch_prob"]),
    (dict(label_smoothing=2), ["label_smoothing"]), (dict(mixup_alpha=0.0), ["mixup_alpha"]),
    (dict(cutmix_alpha=-1.0), ["cutmix_alpha"]), (dict(cutmix_minmax=[0.1]), ["cutmix_minmax", "[0.1]"]),
    (dict(multi_label=True), ["multi_label", "timm"]),
], ids=str)
def test_wrong_options_of_timms_are_refused(options, words):
    assert_refused(lambda: Mixup(**options), *words)


def test_what_has_no_images_or_labels_is_refused():
    images, labels = torch.rand(2, 3, 4, 4), torch.tensor([1, 2])
    for given, word in (((), "nothing"), (((images,),), "1 part"), (({"image": images, "y": labels},), "'y'"),
                        ((({}, labels),), "images"), ((images, None), "NoneType")):
        assert_refused(lambda: MixUp()(*given), word)
    assert_refused(lambda: CutMix(labels_getter="labels"), "labels_getter", "'labels'")
    samples = [(np.zeros((3, 4, 4), np.float32), 1)] * 3
    assert_refused(lambda: FastCollateMixup()(samples), "images", "float32")
    samples = [(np.zeros((3, 4, 4), np.uint8), 1)] * 3
    assert_refused(lambda: FastCollateMixup(mode="half")(samples), "samples", "3")


# ------------------------------------------------------------------------------------------------------------- smoothed

def smoothed(device="cpu"):
    indices, weights = torch.tensor([[3, 1], [-100, -100], [0, 6]]), torch.tensor([[0.75, 0.25], [0.5, 0.5], [1, 0]])
    return SmoothedTarget(SparseTarget.from_topk(indices, weights, num_classes=CLASSES).to(device), 0.2)


def test_a_smoothed_target_is_what_it_says(device):
    target = smoothed(device)
    dense = target.to_dense()
    rows = [[0, 0.2, 0, 0.6, 0, 0, 0], [0] * 7, [0.8, 0, 0, 0, 0, 0, 0]]
    expected = torch.tensor(rows) + torch.tensor([[0.2], [0.0], [0.2]]) / CLASSES
    torch.testing.assert_close(dense.cpu(), expected)
    assert target.shape == (3,) and len(target) == 3 and str(target.smoothing) in repr(target)
    moved = pickle.loads(pickle.dumps(target.to("cpu")))
    assert moved[2:].smoothing == 0.2 and torch.equal(moved[2:].to_dense(), dense.cpu()[2:])
    leaves, spec = torch.utils._pytree.tree_flatten(target)
    assert len(leaves) == 2 and torch.equal(torch.utils._pytree.tree_unflatten(leaves, spec).to_dense(), dense)


def test_losses_that_would_forget_the_smoothing_refuse_it():
    target, logits = smoothed(), torch.zeros(3, CLASSES)
    assert_refused(lambda: cross_entropy(logits, target), "target", "SmoothedTarget")
    assert_refused(lambda: SmoothedTarget(torch.zeros(3), 0.1), "target", "Tensor")
    assert_refused(lambda: SmoothedTarget(target.target, 1.5), "smoothing", "1.5")
    assert_refused(lambda: SmoothedTarget(target.target, None), "smoothing", "None")
    without = SmoothedTarget(SparseTarget.from_index(torch.tensor([1])), 0.1)
    assert_refused(without.to_dense, "num_classes", "None")
