"""Compares with torchvision and timm: ``python vision_process.py``, started by test_data_vision.

Both libraries get the same seed. Prints a line of JSON for each check: its name, and the failure.
"""

import doctest
import inspect
import json
import pickle
import traceback

import numpy as np
import torch
import torch.nn.functional as F

CHECKS = {}
CLASSES = 7


def check(f):
    CHECKS[f.__name__] = f
    return f


def batch(n=6, dtype=torch.float32, size=(3, 9, 12)):
    """Returns a batch of images and labels, in which some neighbors have the same class."""
    generator = torch.Generator().manual_seed(n)
    images = torch.randint(256, (n, *size), generator=generator)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    labels[1] = labels[0]
    return (images.to(torch.uint8) if dtype == torch.uint8 else (images / 255).to(dtype)), labels


def assert_equal(ours, theirs, what="images"):
    assert type(ours) is type(theirs), f"{what}: {type(ours)} and not {type(theirs)}"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def assert_same_target(ours, theirs, exactly=True):
    """Checks that ours is sparse and equal to theirs when dense; smoothing rounds differently."""
    sparse = getattr(ours, "target", ours)
    assert sparse.indices.shape == (*theirs.shape[:1], 2) and sparse.values.dtype == torch.float32
    torch.testing.assert_close(ours.to_dense(), theirs, **(dict(rtol=0, atol=0) if exactly else {}))


def seeded(seed, call):
    """Returns the result of ``call``, and the next numbers of the generators that it may use."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    return call(), (torch.rand(()).item(), np.random.rand())


# ------------------------------------------------------------------------------------------------------- torchvision

@check
def torchvision_mixes_the_same_with_the_same_seed():
    from torchvision.transforms import v2

    from sparse_ce.integrations import torchvision as ours_of
    for name, dtypes in (("MixUp", ()), ("CutMix", (torch.uint8, torch.int16))):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, *dtypes):
            for seed, alpha in enumerate((0.05, 0.2, 1.0, 1.0, 1.0, 3.0)):
                images, labels = batch(dtype=dtype)
                options = dict(alpha=alpha, num_classes=CLASSES)
                transform = pickle.loads(pickle.dumps(getattr(ours_of, name)(**options)))
                (ours, target), after = seeded(seed, lambda: transform(images, labels))
                (theirs, dense), expected = seeded(seed, lambda: getattr(v2, name)(**options)(images, labels))
                assert_equal(ours, theirs)
                assert_same_target(target, dense)
                assert after == expected and target.num_classes == CLASSES


@check
def torchvision_finds_labels_and_images_in_the_same_places():
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    from sparse_ce.integrations import torchvision as ours_of
    images, labels = batch()
    given = {"first": tv_tensors.Image(images), "id": torch.arange(6), "name": "x", "my_Label": labels}
    for name in ("MixUp", "CutMix"):
        ours, theirs = (seeded(3, lambda: getattr(of, name)(num_classes=CLASSES)(given))[0] for of in (ours_of, v2))
        assert list(ours) == list(theirs) and ours["name"] == "x"
        for key in ("first", "id"):
            assert_equal(ours[key], theirs[key])
        assert_same_target(ours["my_Label"], theirs["my_Label"])


@check
def torchvision_chooses_among_ours_in_a_collate_fn_with_workers():
    from torch.utils.data import DataLoader, default_collate
    from torchvision.transforms import v2

    from sparse_ce.integrations import torchvision as ours_of
    samples = list(zip(*batch(24)))

    def mixed(of):
        choice = v2.RandomChoice([of.CutMix(num_classes=CLASSES), of.MixUp(num_classes=CLASSES, alpha=0.2)])
        torch.manual_seed(5)
        return list(DataLoader(samples, 4, shuffle=True, num_workers=2,
                               collate_fn=lambda samples: choice(*default_collate(samples))))

    for (ours, target), (theirs, dense) in zip(mixed(ours_of), mixed(v2), strict=True):
        assert_equal(ours, theirs)
        assert_same_target(target, dense)


@check
def torchvision_mixes_weights_of_all_classes_itself():
    from torchvision.transforms import v2

    from sparse_ce.integrations import torchvision as ours_of
    images, labels = batch()
    for name in ("MixUp", "CutMix"):
        ours, theirs = (seeded(1, lambda: getattr(of, name)()(images, F.one_hot(labels, CLASSES)))[0]
                        for of in (ours_of, v2))
        for one, other in zip(ours, theirs):
            assert_equal(one, other)


# -------------------------------------------------------------------------------------------------------------- timm

OF_TIMM = [dict(mixup_alpha=0.8), dict(mixup_alpha=0.0, cutmix_alpha=1.0), dict(mixup_alpha=0.8, cutmix_alpha=1.0),
           dict(mixup_alpha=0.1, cutmix_alpha=0.1, prob=0.5, switch_prob=0.3), dict(cutmix_minmax=(0.2, 0.8)),
           dict(mixup_alpha=0.0, cutmix_minmax=(0.3, 0.9), prob=0.7, correct_lam=False),
           dict(cutmix_alpha=2.0, correct_lam=False), dict(cutmix_alpha=1.0, prob=0.0)]


@check
def timm_mixes_the_same_with_the_same_seed():
    import timm.data

    from sparse_ce.integrations import timm as ours_of
    for mode in ("batch", "pair", "elem"):
        for options in OF_TIMM:
            for seed in range(6):
                smoothing = 0.1 * (seed % 2)
                dtype = (torch.float32, torch.float64, torch.float16, torch.bfloat16)[seed % 4]
                options = dict(options, mode=mode, num_classes=CLASSES, label_smoothing=smoothing)
                images, labels = batch(dtype=dtype, size=(3, 19, 23))
                ours = pickle.loads(pickle.dumps(ours_of.Mixup(**options)))
                (mixed, target), after = seeded(seed, lambda: ours(images.clone(), labels))
                assert (ours.num_classes, ours.label_smoothing) == (CLASSES, smoothing)
                (theirs, dense), expected = seeded(seed, lambda: timm.data.Mixup(**options)(images.clone(), labels))
                assert_equal(mixed, theirs, f"{options} seed {seed}")
                # timm computes each row's weights in the images' dtype.
                rough = mode != "batch" and dtype in (torch.float16, torch.bfloat16)
                torch.testing.assert_close(target.to_dense(), dense.float(), atol=5e-3 if rough else 1e-6, rtol=0)
                if not smoothing and not rough and dtype == torch.float32:
                    assert_same_target(target, dense)
                assert after == expected, options


@check
def timm_is_switched_off_the_same():
    import timm.data

    from sparse_ce.integrations import timm as ours_of
    images, labels = batch()
    for mode in ("batch", "pair", "elem"):
        both = [of.Mixup(cutmix_alpha=1.0, num_classes=CLASSES, mode=mode) for of in (ours_of, timm.data)]
        for one in both:
            one.mixup_enabled = False
        ours, theirs = [one(images.clone(), labels) for one in both]
        assert_equal(ours[0], theirs[0])
        assert_equal(ours[0], images)
        torch.testing.assert_close(ours[1].to_dense(), theirs[1])
        assert torch.equal(ours[1].target.indices, labels[:, None].expand(-1, 2))


@check
def timm_collates_the_same_with_the_same_seed():
    import timm.data

    from sparse_ce.integrations import timm as ours_of
    images, labels = batch(dtype=torch.uint8, size=(3, 19, 23))
    for mode in ("batch", "pair", "elem", "half"):
        for options in OF_TIMM:
            for seed in range(4):
                options = dict(options, mode=mode, num_classes=CLASSES, label_smoothing=0.0)
                as_arrays = seed % 2

                def samples():  # timm writes to them
                    return [(image.numpy().copy() if as_arrays else image.clone(), int(label))
                            for image, label in zip(images, labels)]

                (mixed, target), after = seeded(seed, lambda: ours_of.FastCollateMixup(**options)(samples()))
                (theirs, dense), expected = seeded(seed, lambda: timm.data.FastCollateMixup(**options)(samples()))
                assert_equal(mixed, theirs, f"{options} seed {seed}")
                assert_same_target(target, dense.float())  # float64 in timm 1.0.28 and older
                assert after == expected, options


@check
def timm_has_the_same_losses():
    import timm.data
    import timm.loss

    import sparse_ce
    from close import assert_close_to_float64
    from sparse_ce.integrations import timm as ours_of
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(50, (16,), generator=generator)
    images = torch.zeros(16, 3, 4, 4)
    peaks = 8 * F.one_hot(labels, 50)
    base = 2 * torch.randn(16, 50, generator=generator, dtype=torch.float64) + peaks
    unnormalised = torch.randn(16, 50, generator=generator)
    few = torch.where(torch.rand(16, 50, generator=generator) < 0.05, unnormalised, 0.0)
    targets = [(unnormalised, unnormalised), (few, few), (few.to_sparse(), few), (few.to_sparse_csr(), few)]
    for smoothing in (0.0, 0.1):
        options = dict(mode="elem", num_classes=50, label_smoothing=smoothing)
        np.random.seed(1)
        _, ours = ours_of.Mixup(**options)(images, labels)
        np.random.seed(1)
        _, theirs = timm.data.Mixup(**options)(images.clone(), labels)
        # In float64 the rounding of a float32 product would be visible.
        sparse = ours.target if smoothing else ours
        targets += [(ours, sparse.to_dense().double() * (1 - smoothing) + smoothing / 50), (theirs, theirs)]

    def run(criterion, logits, target):
        logits = logits.detach().requires_grad_()
        loss = criterion(logits, target)
        (1.7 * loss).backward()
        return loss.detach(), logits.grad

    losses = [(sparse_ce.SoftTargetCrossEntropy(), timm.loss.SoftTargetCrossEntropy(), ours, theirs)
              for ours, theirs in targets]
    losses += [(sparse_ce.LabelSmoothingCrossEntropy(s), timm.loss.LabelSmoothingCrossEntropy(s), labels, labels)
               for s in (0.0, 0.1, 0.5)]
    losses += [(sparse_ce.LabelSmoothingCrossEntropy(), timm.loss.LabelSmoothingCrossEntropy(), labels, labels)]
    for ours, theirs, target, peer_target in losses:
        for dtype in (torch.float32, torch.float64):
            wide = peer_target.double() if peer_target.is_floating_point() else peer_target
            peer = peer_target.to(dtype) if peer_target.is_floating_point() else peer_target
            # Dense weights have the dtype of the logits, as in a training loop.
            given = target.to(dtype) if isinstance(target, torch.Tensor) and target.is_floating_point() else target
            for got, close, exact in zip(run(ours, base.to(dtype), given), run(theirs, base.to(dtype), peer),
                                         run(theirs, base.to(dtype).double(), wide)):
                assert_close_to_float64(got.to(dtype), close, exact)


@check
def a_label_without_a_share_does_not_say_whether_its_row_is_ignored():
    from sparse_ce.integrations import timm as ours_of
    images, _ = batch()
    labels = torch.tensor([-100, 1, -100, -100, 4, 5])
    mixup = ours_of.Mixup(mode="elem", num_classes=CLASSES, label_smoothing=0.0)
    for lam in (0.0, 0.25, 1.0):
        mixup._params_per_elem = lambda n: (np.full(n, lam, np.float32), np.zeros(n, bool))
        _, target = mixup(images.clone(), labels)
        counts = labels.ne(-100)
        counts = {0.0: counts.flip(0), 0.25: counts | counts.flip(0), 1.0: counts}[lam]
        assert target.ne(-100).tolist() == counts.tolist(), lam
        one_hot = F.one_hot(labels.clamp(min=0), CLASSES) * labels.ne(-100)[:, None]
        torch.testing.assert_close(target.to_dense(), lam * one_hot + (1 - lam) * one_hot.flip(0))


@check
def what_has_no_sparse_target_is_refused_or_left_to_timm():
    import timm.data

    from refusals import assert_refused
    from sparse_ce.integrations import timm as ours_of
    from sparse_ce.integrations import torchvision as ours_too
    images, labels = batch()
    assert_refused(lambda: ours_of.Mixup()(batch(dtype=torch.uint8)[0], labels), "uint8")
    assert_refused(lambda: ours_of.Mixup()(images, F.one_hot(labels)), "labels", list(F.one_hot(labels).shape))
    assert_refused(lambda: ours_of.Mixup()(images, labels.float()), "labels", "float32")
    assert_refused(lambda: ours_too.MixUp(num_classes=3)(images, labels.float()), "labels", "float32")
    several = F.one_hot(labels, CLASSES)
    samples = [(image, row) for image, row in zip(batch(dtype=torch.uint8)[0], several)]
    if "multi_label" not in inspect.signature(timm.data.Mixup.__init__).parameters:
        return  # timm 1.0.30 and older mix single labels only
    options = dict(num_classes=CLASSES, multi_label=True)
    for name, given in (("Mixup", (images, several)), ("FastCollateMixup", (samples,))):
        ours, theirs = (seeded(2, lambda: getattr(of, name)(**options)(*pickle.loads(pickle.dumps(given))))[0]
                        for of in (ours_of, timm.data))
        for one, other in zip(ours, theirs):
            assert_equal(one, other)


@check
def the_examples_of_docstrings_run():
    import sparse_ce
    from sparse_ce.integrations import timm as ours_of
    from sparse_ce.integrations import torchvision as ours_too
    for module in (ours_of, ours_too):
        names = {**vars(module), "torch": torch, "sparse_ce": sparse_ce, "SparseTarget": sparse_ce.SparseTarget}
        for public in module.__all__:
            found = doctest.DocTestFinder().find(getattr(module, public), public, module=False, globs=names)
            examples = [one for one in found if one.examples]
            assert examples, public
            for one in examples:
                said = []
                assert not doctest.DocTestRunner().run(one, out=said.append).failed, "".join(said)


if __name__ == "__main__":
    import vision_clients
    vision_clients.make_importable()
    for name, one in CHECKS.items():
        try:
            one()
            wrong = ""
        except Exception:
            wrong = traceback.format_exc()
        print(json.dumps([name, wrong]), flush=True)
