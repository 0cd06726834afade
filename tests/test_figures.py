"""Pictures show what they claim."""
import io
import re

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from nibabel import orientations
from PIL import Image

from Dataloader.synthetic import random_field, template
from Diffusion.fields import identity, warp
from Diffusion.figures import (
    FIXED_LINE,
    FOLDED,
    MOVING_LINE,
    NOTHING,
    PLANES,
    contact_sheet,
    gallery_figure,
    middle_slices,
    registration_figure,
    turn_to_screen,
)
from Report.page import VIEWER_SCRIPT, figure_png


def pair(size):
    """A template, its deformed copy, a warped image that is nearly there, the field and the three labels."""
    image, label = template(size, len(size))
    field = torch.from_numpy(random_field(1, size, dims=len(size)))
    moving, moving_label = (torch.from_numpy(a.astype(np.float32)) for a in (image, label))
    fixed, warped = (warp(moving[None, None], f * field[None])[0, 0] for f in (1.0, 0.9))
    labels = [warp(moving_label[None, None], f * field[None], mode="nearest")[0, 0] for f in (0.0, 1.0, 0.9)]
    return moving, fixed, warped, field, labels


def reflection(size):
    """x -> (n - 1) - x along the first axis: determinant -1 everywhere."""
    field = torch.zeros(len(size), *size)
    field[0] = size[0] - 1 - 2 * identity(size)[0, 0]
    return field


def pixels(png):
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def share(image, color):
    """Share of the pixels that have exactly the colour "#rrggbb"."""
    return (image == [int(color[i:i + 2], 16) for i in (1, 3, 5)]).all(axis=-1).mean()


def on_screen(volume):
    """The middle slices of a volume of the training grid, as the figures show them: the first axis right."""
    field = np.zeros((np.ndim(volume), *np.shape(volume)), np.float32)
    return middle_slices(turn_to_screen({"": np.asarray(volume)}, {}, field, np.eye(4))["images"][""])


def test_middle_slices_in_3d_and_2d():
    volume = np.arange(4 * 5 * 6).reshape(4, 5, 6)
    turned = volume[::-1, ::-1, ::-1]
    for got, expected in zip(on_screen(volume), (turned[2], turned[:, 2], turned[:, :, 3]), strict=True):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(on_screen(volume[0])[0], volume[0][:, ::-1])


@pytest.mark.parametrize("size, labelled", [((20, 28, 24), True), ((24, 36), True), ((24, 36), False)])
def test_registration_figure_draws_every_panel(size, labelled):
    moving, fixed, warped, field, labels = pair(size)
    figure = registration_figure(moving, fixed, warped, field, labels if labelled else None, title="a $_1 to b $_2")
    rows = 3 if len(size) == 3 else 1
    assert len(figure.axes) == 7 * rows + 2
    assert figure.get_suptitle().startswith("a $_1 to b $_2\nsmallest Jacobian determinant 0.")
    assert "folded 0 %" in figure.get_suptitle()
    outlined = [{to_hex(color) for part in ax.collections for color in part.get_edgecolor()}
                for ax in figure.axes[:7 * rows]]
    both = {FIXED_LINE, MOVING_LINE} if labelled else set()
    expected = [both, both & {FIXED_LINE}, both, set(), set(), set(), set()]
    assert outlined == [colors for colors in expected for _ in range(rows)]
    png = figure_png(figure)
    assert b"matplotlib" not in png
    image = pixels(png)
    assert image.std() > 20
    width, height = (figure.get_size_inches() * figure.dpi).astype(int)
    scale = image.shape[0] / height
    for ax in figure.axes:
        box = ax.get_window_extent()
        part = image[int((height - box.y1) * scale) + 2:int((height - box.y0) * scale) - 2,
                     int(box.x0 * scale) + 2:int(box.x1 * scale) - 2]
        assert part.std() > 5, ax.get_position()


@pytest.mark.parametrize("size", [(20, 28, 24), (20, 28)])
def test_slices_have_the_right_side_on_the_left_and_the_head_up(size):
    moving, fixed, warped, field, _ = pair(size)
    figure = registration_figure(moving, fixed, warped, field)
    shown = [ax.images[0] for ax in figure.axes[:2 * len(size) - 3]]
    slices = [moving.numpy()[:, ::-1]] if len(size) == 2 else on_screen(moving)
    for image, expected in zip(shown, slices, strict=True):
        np.testing.assert_array_equal(image.get_array(), expected.T)
        assert image.origin == "upper"


@pytest.mark.parametrize("second, down", [((0, -1, 0), True), ((0.1, 0.3, -0.9), True), ((0, 1, 0), False),
                                          ((0, 0, 1), False), ((-1, 0, 0), False)],
                         ids=["back", "feet", "front", "head", "left"])
def test_a_slice_whose_second_axis_runs_to_the_back_or_to_the_feet_is_drawn_downwards(second, down):
    """As a DICOM viewer shows an X-ray, whose world is ITK's."""
    moving, fixed, warped, field, _ = pair((20, 28))
    first = np.roll(np.eye(3)[np.abs(second).argmax()], 1)
    affine = np.eye(4)
    affine[:3, :3] = np.stack([first, second, np.cross(first, second)], axis=1)
    figure = registration_figure(moving, fixed, warped, field, affine=affine)
    shown = np.s_[:, :] if down else np.s_[:, ::-1]
    np.testing.assert_array_equal(figure.axes[1].images[0].get_array(), fixed.numpy()[shown].T)
    assert ("first \u2192\nsecond \u2193" if down else "first \u2192\nsecond \u2191") in [
        text.get_text() for text in figure.texts]
    moved = turn_to_screen({}, {}, field.numpy(), affine)["field"][..., 0]
    np.testing.assert_array_equal(moved, np.stack([field[0], field[1] if down else -field[1]])[:, *shown])


@pytest.mark.slow
def test_however_a_volume_is_stored_its_picture_is_the_same():
    size, affine = (14, 17, 10), np.diag([1, 0.8, 4, 1])
    moving, fixed, warped, field, labels = pair(size)
    volumes, field = [volume.numpy() for volume in (moving, fixed, warped, *labels)], field.numpy()
    body = volumes[1] > 0.1

    def picture(volumes, field, affine, body):
        figure = registration_figure(*volumes[:3], field, volumes[3:], "a pair", body, affine)
        return pixels(figure_png(figure)).astype(int)

    plain = picture(volumes, field, affine, body)
    for axes, signs in ((0, 1, 2), (-1, -1, 1)), ((1, 2, 0), (1, -1, -1)):  # LPS, and one whose first axis is A
        turn = np.stack([np.argsort(axes), np.array(signs)[np.argsort(axes)]], axis=1)
        *stored, stored_body = (orientations.apply_orientation(volume, turn) for volume in (*volumes, body))
        parts = [signs[k] * orientations.apply_orientation(field[axes[k]], turn) for k in range(3)]
        other = picture(stored, np.stack(parts), affine @ orientations.inv_ornt_aff(turn, size), stored_body)
        assert np.abs(other - plain).max() <= 2, "but for the order of a sum"


def test_slices_are_true_in_mm():
    size = (20, 24, 6)
    images, field = np.random.default_rng(0).random((3, *size)), np.zeros((3, *size), np.float32)
    figure = registration_figure(*images, field, affine=np.diag([1, 1, 5, 1]))
    figure.draw_without_rendering()
    mm = np.array([20, 24, 30])
    inches = [[ax.get_window_extent().width, ax.get_window_extent().height] for ax in figure.axes[:21]]
    sides = [mm[[right, down]] for _, right, down, _ in PLANES] * 7  # the axes are listed column by column
    np.testing.assert_allclose(np.divide(inches, sides), np.divide(inches, sides)[0, 0], rtol=0.01)


@pytest.mark.slow
def test_a_moving_volume_that_the_headers_place_elsewhere_is_no_riddle():
    size = (12, 10, 8)
    fixed, warped, partly = np.random.default_rng(0).random((3, *size))
    partly[:, :, 3:] = 0  # the middle axial slice is empty
    field = np.zeros((3, *size), np.float32)

    def phrases(moving, **options):
        figure = registration_figure(moving, fixed, warped, field, **options)
        said = [NOTHING in [text.get_text() for text in ax.texts] for ax in figure.axes]
        return said[:3], any(said[3:]), "as the headers place it" in [text.get_text() for text in figure.texts]

    assert phrases(0 * fixed, by_headers=True) == ([True] * 3, False, True)
    assert phrases(partly, by_headers=True) == ([False, False, True], False, True)
    assert phrases(fixed, by_headers=True) == ([False] * 3, False, True)
    assert phrases(0 * fixed) == ([False] * 3, False, False)


def test_differences_share_one_scale_and_do_not_wrap_around():
    moving, fixed, warped = (np.full((8, 10), value, np.uint8) for value in (9, 4, 5))
    figure = registration_figure(moving, fixed, warped, np.zeros((2, 8, 10)))
    before, after = (figure.axes[column].images[0] for column in (3, 4))
    assert before.get_clim() == after.get_clim()
    assert (before.get_array() == 5).all() and (after.get_array() == 1).all()


def test_grid_is_drawn_where_the_field_points():
    size = (12, 16)
    field = torch.zeros(2, *size)
    field[0], field[1] = 2.0, -1.0  # to the right and down
    ax = registration_figure(*[np.zeros(size)] * 3, field).axes[5]
    x, y = (np.concatenate([line.get_data()[i] for line in ax.lines]) for i in (0, 1))
    assert (x.min(), x.max(), y.min(), y.max()) == (2, 13, 1, 16)
    assert len(ax.lines) == sum(size)


def test_folding_of_a_reflection_is_in_the_title_and_in_the_picture():
    size = (8, 10)
    field = reflection(size)
    images = [np.random.default_rng(i).random(size) for i in range(3)]
    figure = registration_figure(*images, field)
    assert figure.get_suptitle() == ("smallest Jacobian determinant -1, folded 100 % of voxels "
                                     "(determinant 0 or less)")
    half = field.clone()
    half[..., size[-1] // 2:] = 0
    percent = float(re.search(r"folded ([\d.]+) %", registration_figure(*images, half).get_suptitle())[1])
    assert percent == 50
    assert share(pixels(figure_png(figure)), FOLDED) > 0.02
    assert share(pixels(figure_png(registration_figure(*images, 0 * field))), FOLDED) == 0


@pytest.mark.parametrize("size", [(16, 20, 24), (16, 20)])
def test_gallery_shows_image_outlines_and_grid_of_each_copy(size):
    _, fixed, _, field, labels = pair(size)
    affine = np.diag([1, 2, 1, 1])
    figure = gallery_figure([("original", fixed, labels[1], None, affine), ("copy", fixed, labels[1], field, affine)])
    assert [ax.get_title() for ax in figure.axes] == ["original", "copy", "", ""]
    np.testing.assert_array_equal(figure.axes[1].images[0].get_array(), on_screen(fixed)[-1].T)
    assert {ax.get_aspect() for ax in figure.axes} == {2}
    assert all(ax.collections for ax in figure.axes[:2])
    still, moved = (np.concatenate([line.get_xdata() for line in ax.lines]) for ax in figure.axes[2:])
    assert (still == np.round(still)).all() and not (moved == np.round(moved)).all()
    assert len(still) == len(moved)


@pytest.mark.parametrize("size, count", [((16, 20, 24), 1), ((16, 20, 24), 5), ((16, 20), 14)])
def test_contact_sheet_shows_the_middle_slices_of_every_volume_with_the_outlines_of_its_labels(size, count):
    images = [(np.random.default_rng(i).random(size) * 255).astype(np.uint8) for i in range(count)]
    label = template(size, len(size))[1]
    figure = contact_sheet([(f"$v_{i} of a name that is far too long for its place", image, None if i % 2 else label)
                            for i, image in enumerate(images)])
    planes = 3 if len(size) == 3 else 1
    shown = [ax for ax in figure.axes if ax.images]
    across = min(12 // planes, count)
    assert len(shown) == planes * count and len(figure.axes) == -(-count // across) * across * planes
    assert not any(ax.axison for ax in figure.axes if not ax.images)
    for i, image in enumerate(images):
        own = shown[i * planes:(i + 1) * planes]
        assert own[0].get_title(loc="left").startswith(f"$v_{i}") and len(own[0].get_title(loc="left")) <= 30
        high = np.percentile(np.concatenate([plane.ravel() for plane in on_screen(image)]), 99.5)
        for ax, plane in zip(own, on_screen(image), strict=True):
            np.testing.assert_array_equal(ax.images[0].get_array(), plane.T)
            assert ax.images[0].get_clim() == (0, pytest.approx(high))
            colors = {to_hex(color) for part in ax.collections for color in part.get_edgecolor()}
            assert colors == (set() if i % 2 else {FIXED_LINE})
    assert pixels(figure_png(figure)).std() > 20


def test_slices_have_the_names_and_letters_of_the_viewer():
    volumes, field = np.random.default_rng(0).random((3, 8, 9, 7)), np.zeros((3, 8, 9, 7), np.float32)
    affine = np.array([[0, -1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]])  # "SLA"
    words = [text.get_text() for text in registration_figure(*volumes, field, affine=affine).texts]
    assert "sagittal\n5/9\nA \u2192 P\nS \u2193 I" in words and "axial\n5/8\nR \u2192 L\nA \u2193 P" in words
    for through, (name, right, down, letters) in enumerate(PLANES):
        line = f'{name}: {{ right: {right}, down: {down}, through: {through}, letters: "{letters}" }},'
        assert line in VIEWER_SCRIPT, "both know the same planes"
