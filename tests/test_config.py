"""Configuration: every key explained, checked and converted; every error one sentence with the nearest key."""
import math
import re

import pytest
import yaml

import OM_prepare
import OM_train_3modes
from Dataloader.sampler import steps_left
from OM_train_3modes import MODES
from Runtime.config import KEYS, flatten, load_config, modes_of, save_config
from Runtime.errors import InputError
from Runtime.global_batch import split_step
from tests.tiny import ROOT

OM = ROOT / "Config/config_om.yaml"


def refusal(*arguments):
    """The sentence with which `load_config` refuses."""
    with pytest.raises(InputError) as error:
        load_config(*arguments)
    return str(error.value)


@pytest.mark.parametrize("path", sorted((ROOT / "Config").glob("config_*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_load(path):
    assert list(load_config(path)) == list(KEYS)


def test_recorded_values_of_the_campaign():
    cfg = load_config(ROOT / "Config/config_campaign.yaml")
    expected = {"data.name": "all", "data.img_size": [128] * 3, "data.batchsize": 2, "diffusion.timesteps": 80,
                "optim.lr": 1e-5, "model.condition_type": "slice", "run.device": "auto", "registration.gate": -0.7,
                "diffusion.grids": [8, 16, 32, 64], "diffusion.v_scale": 4e-5, "diffusion.noise_ratio": 0.08,
                "loss.regul": 10.0, "contrastive.clip_norm": 1e-3, "registration.clip_norm": 0.1,
                "data.diff_reg_batch_ratio": 2, "model.rec_num": 2, "data.expect_samples": 14814, "data.pairs": 2583,
                "loss.dist": 1.0, "loss.ang": 1.0, "model.channels": [16, 32, 64, 128, 256],
                "model.use_checkpoint": True, "registration.window": 9,
                "optim.average": 0.0, "optim.schedule": "constant"}
    assert {key: cfg[key] for key in expected} == expected


def test_the_campaign_takes_41_steps_an_epoch_on_64_ranks():
    cfg = load_config(ROOT / "Config/config_campaign.yaml")
    split = split_step(cfg, 64)
    assert (split.samples, split.pairs) == (128, 64)
    assert steps_left(cfg, 14814, None, split) == 41 == math.ceil(2583 / 64)


def test_the_production_config_has_the_recipe_of_the_small_ones():
    om, small = load_config(OM), load_config(ROOT / "Config/config_hippocampus.yaml")
    same = [key for key in KEYS if key.startswith(("loss.", "augment.", "optim.")) and key != "optim.lr"]
    same += ["registration.gate", "model.affine_match", "model.local_match", "data.diff_reg_batch_ratio"]
    assert {key: om[key] for key in same} == {key: small[key] for key in same}
    assert om["data.expect_samples"] == 0


@pytest.mark.parametrize("name, base", [
    *[(name, "config_om.yaml") for name in ("config_medium", "config_hippocampus", "config_demo", "config_universal",
                                            "config_cmr")], ("config_lung_ct", "config_cmr.yaml")])
def test_configs_list_only_what_differs(name, base):
    own = flatten(yaml.safe_load((ROOT / f"Config/{name}.yaml").read_text()), name)
    assert own.pop("base") == base
    below, cfg = load_config(ROOT / "Config" / base), load_config(ROOT / f"Config/{name}.yaml")
    assert [key for key in own if below[key] == cfg[key]] == []


@pytest.mark.parametrize("name, dims, side, start", [("config_cmr", 2, 256, "48+2"),
                                                     ("config_lung_ct", 3, 128, "64+1")])
def test_the_configs_of_the_published_method_have_its_settings(name, dims, side, start):
    cfg = load_config(ROOT / f"Config/{name}.yaml")
    expected = {"model.name": "recresacnet", "model.dims": dims, "model.rec_num": 2, "model.condition_type": "none",
                "data.img_size": [side] * dims, "data.batchsize": 1, "diffusion.timesteps": 80,
                "diffusion.v_scale": 4e-5, "diffusion.grids": [8, 16, 32, 64], "diffusion.noise_ratio": 0.08,
                "loss.dist": 1.0, "loss.ang": 1.0, "loss.regul": 10.0, "optim.lr": 1e-4, "copies.start": start,
                "copies.recover": "published", "copies.permute": True}
    assert {key: cfg[key] for key in expected} == expected
    assert [mode.name for mode in modes_of(cfg, MODES)] == ["diffusion"]


def test_a_network_that_is_shown_one_volume_trains_mode_1_alone():
    cfg = load_config(OM, ["model.condition_type=none"])
    with pytest.raises(InputError, match="condition_type none the network sees only one volume.* set loss.contrastive, "
                       "loss.imgsim, .* to 0"):
        modes_of(cfg, MODES)


@pytest.mark.parametrize("name", ["config_hippocampus_registration", "config_hippocampus_labels"])
def test_configs_for_registration_alone_train_mode_3_and_nothing_else(name):
    assert [mode.name for mode in modes_of(load_config(ROOT / f"Config/{name}.yaml"), MODES)] == ["registration"]


def test_a_base_is_looked_for_beside_the_file_and_then_in_config(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: config_demo.yaml\noptim:\n  lr: 5.0e-5\n")
    cfg = load_config(tmp_path / "mine.yaml", ["data.batchsize=3"])
    demo = load_config(ROOT / "Config/config_demo.yaml")
    assert cfg == {**demo, "optim.lr": 5e-5, "data.batchsize": 3}
    (tmp_path / "config_demo.yaml").write_text("base: config_om.yaml\nmodel:\n  rec_num: 7\n")
    assert load_config(tmp_path / "mine.yaml")["model.rec_num"] == 7


def test_every_key_is_explained_with_default_unit_and_allowed_values():
    section, explained = None, {}
    for line in OM.read_text().splitlines():
        if match := re.match(r"(\w+):", line):
            section = match[1]
        elif match := re.match(r"  (\w+): (.*?)\s+# (.*)", line):
            explained[f"{section}.{match[1]}"] = (match[2], match[3].split(" | "))
    assert set(explained) == set(KEYS)
    for key, (value, fields) in explained.items():
        assert len(fields) == 4 and all(fields), f"{key}: a comment gives default | unit | allowed | meaning"
        default, given = yaml.safe_load(fields[0]), yaml.safe_load(value)
        same = float(default) == float(given) if KEYS[key][0] in ("int", "float") else default == given
        assert same, f"{key} is {given}, its comment says {default}"
        choices = KEYS[key][1] if KEYS[key][0] == "str" and len(KEYS[key]) > 1 else ()
        assert all(word in fields[2] for word in choices), f"{key}: the comment misses an allowed value"


@pytest.mark.parametrize("override, value", [
    ("optim.lr=1e-5", 1e-5), ("optim.lr='1e-5'", 1e-5), ("optim.lr=1", 1.0), ("data.batchsize=4", 4),
    ("data.batchsize=4.0", 4), ("run.amp=off", "off"), ("data.train_ids=1-60", "1-60"), ("data.train_ids=7", "7"),
    ("data.train_ids=", ""), ("data.img_size=96", [96, 96, 96]), ("data.img_size=[64, 80, 96]", [64, 80, 96]),
    ("data.root=/a=b", "/a=b"), ("registration.squared=false", False), ("run.checksum_every=0", 0),
    ("data.window=[-1000, 500]", [-1000.0, 500.0]), ("run.notify=a: b", "a: b"),
    ("run.notify=echo \"$A: $B\" >> told", 'echo "$A: $B" >> told'), ("registration.scales=8", 8),
    ("run.strategy=zero1", "zero1"), ("run.strategy=fsdp", "fsdp"), ("run.refresh_process_group_every=1", 1),
    ("run.bf16_sums=true", True)])
def test_overrides_are_converted(override, value):
    found = load_config(OM, [override])[override.partition("=")[0]]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("program", [OM_prepare, OM_train_3modes], ids=lambda module: module.__name__)
def test_an_option_takes_several_overrides(program):
    args = program.parse_arguments(["--config", "x", "--set", "model.dims=2", "optim.lr=1e-5", "--set", "run.seed=7"])
    assert args.overrides == ["model.dims=2", "optim.lr=1e-5", "run.seed=7"]


@pytest.mark.parametrize("override, words", [
    ("data.batchsise=4", ["data.batchsise", "data.batchsize"]),
    ("data.window=[500, -1000]", ["data.window", "two rising numbers", "[500.0, -1000.0]"]),
    ("data.percentiles=[1]", ["data.percentiles", "two rising numbers such as [0.5, 99.5], not [1.0]"]),
    ("data.percentiles=[0, 0]", ["data.percentiles", "two rising numbers such as [0.5, 99.5], not [0.0, 0.0]"]),
    ("data.percentiles=[1, 101]", ["data.percentiles", "between 0 and 100"]),
    ("data.percentiles=1", ["data.percentiles", "a list of numbers"]),
    ("optim.lr", ["key=value"]),
    ("optim.lr=fast", ["optim.lr", "number", "fast"]),
    ("optim.lr=nan", ["optim.lr", "nan"]),
    ("optim.lr=.inf", ["optim.lr", "inf"]),
    ("run.epochs=.inf", ["run.epochs", "whole number", "inf"]),
    ("optim.lr=0", ["optim.lr", "at least"]),
    ("optim.lr=true", ["optim.lr", "'true'"]),
    ("data.batchsize=2.5", ["data.batchsize", "whole number", "2.5"]),
    ("data.batchsize=0", ["data.batchsize", "at least 1"]),
    ("model.dims=4", ["model.dims", "between 2 and 3"]),
    ("model.use_checkpoint=1", ["model.use_checkpoint", "true or false"]),
    ("model.condition_type=slices", ["model.condition_type", "none, slice, volume"]),
    ("model.channels=16", ["model.channels", "list"]),
    ("model.channels=[16]", ["model.channels", "levels"]),
    ("model.channels=[16, x]", ["model.channels", "'x'"]),
    ("model.attention_heads=7", ["model.attention_width", "model.attention_heads"]),
    ("diffusion.grids=[8, 4]", ["diffusion.grids", "ascend"]),
    ("diffusion.grids=[8, 30]", ["diffusion.grids", "multiple of 4"]),
    ("data.img_size=32", ["diffusion.grids", "64"]),
    ("data.img_size=[128, 128]", ["data.img_size", "model.dims"]),
    ("registration.window=8", ["registration.window", "odd"]),
    ("run.notify=[a, b]", ["run.notify must be text", "quotes"]),
    ("run.deadline_first_s=1e10", ["run.deadline_first_s", "between 1 and"]),  # no timer takes it
    ("run.deadline_floor_s=1e10", ["run.deadline_floor_s", "between 0.1 and"]),
    ("run.deadline_factor=1e10", ["run.deadline_factor", "between 1 and"]),
    ("run.join_s=1e10", ["run.join_s", "between 1 and"]),  # the libraries' timers overflow and end at once
    ("run.backend_timeout_s=1e10", ["run.backend_timeout_s", "between 10 and"]),
    ("run.seed=18446744073709551616", ["run.seed", "between 0 and"]),  # no generator of torch takes it
    ("run.strategy=zero2", ["run.strategy must be one of ddp, zero1, fsdp, not 'zero2'"]),
    # Values that do not go together.
    ("registration.scales=9", ["cannot be halved for registration.scales 9"]),
    (f"registration.scales={2 ** 53 + 1}", [f"cannot be halved for registration.scales {2 ** 53 + 1}"]),
    ("model.channels=[16, 32] --set model.field_stride=2", ["needs at least 3 levels with model.field_stride 2"]),
    ("run.exact_sums=true --set run.bf16_sums=true", ["run.exact_sums and run.bf16_sums are both true"]),
    *((f"run.strategy={name} --set run.refresh_process_group_every=1",
       [f"run.refresh_process_group_every needs run.strategy ddp, not {name}"]) for name in ("zero1", "fsdp")),
])
def test_bad_values_are_one_sentence(override, words):
    said = refusal(OM, override.split(" --set "))
    assert all(word in said for word in words) and "\n" not in said, said


@pytest.mark.parametrize("side", [4, 12, 16, 40])
def test_the_grids_that_the_refusal_of_others_suggests_are_accepted(side):
    words = ["registration.scales=1", f"data.img_size={side}"]
    grids = re.search(r"diffusion.grids ends with 64.* for example (\[.*\])", refusal(OM, words))[1]
    assert load_config(OM, [*words, f"diffusion.grids={grids}"])["diffusion.grids"][-1] <= side


def test_the_table_of_keys_says_type_and_limits():
    """Config/keys.yaml: its numbers are numbers, its words are words (YAML reads a bare off as false)."""
    assert len(KEYS) > 80 and all("." in key for key in KEYS)
    for key, (kind, *limits) in KEYS.items():
        assert kind in ("int", "float", "int+", "float+", "int or int+", "bool", "auto or bool", "auto or float",
                        "str"), key
        numbers = kind not in ("bool", "auto or bool", "str")
        assert len(limits) == 2 if numbers else len(limits) <= (kind == "str"), key
        assert all(limit is None or type(limit) in (int, float) for limit in limits) if numbers else \
            all(type(word) is str for words in limits for word in words), key


@pytest.mark.parametrize("line", [
    "run.seed: [float, 0]", "run.seed: [float]", "run.seed: float", "run.seed: 3", "run.seed:", "run.seed: []",
    "run.seed: [flaot, 0, null]", "run.seed: [float, 1e-6, null]", "run.seed: [bool, 1]", "run.seed: [str, auto]",
    "run.seed: [str, [auto, off]]", "seed: [bool]"])
def test_a_rule_that_says_no_type_and_limits_is_refused(monkeypatch, line):
    key, rule = yaml.safe_load(line).popitem()
    monkeypatch.setitem(KEYS, key, rule)
    assert f"keys.yaml: {key}: {rule} is no rule; write section.name" in refusal(OM)


@pytest.mark.parametrize("content, words", [
    ("model: [", ["not valid YAML", "line 1"]),
    ("- 3", ["mapping"]),
    ("", ["mapping"]),
    ("model: 3", ["unknown key model", "did you mean"]),
    ("modal:", ["unknown key modal", "did you mean"]),
    ("refine: {lr: 0.1}", ["the key refine.lr was removed in version 1.0.0: refine.step replaces it"]),
    ("base: " + 3000 * "[", ["not valid YAML"]),
    ("base: config_om.yaml\n? [a]\n: 3", ["not valid YAML at line 2"]),
    ("a: !!python/object/apply:os.getcwd []", ["unknown key a"]),
    ("base: config_om.yaml\noptim:\n  lr: 1e-3\nrun:\n  epochs: 3\noptim:\n  average: 0.9\n",
     ["not valid YAML", "line 6: optim appears twice"]),
    ("base: config_om.yaml\nrun:\n  epochs: 3\n  epochs: 4\n", ["line 4: epochs appears twice"]),
    ("base: config_om.yaml\nrun.epochs: 3\nrun:\n  epochs: 4\n", ["run.epochs is there twice"]),
    ("base: config_on.yaml", ["no config", "config_on.yaml"]), ("base: [a, b]", ["base", "path"]),
    ("base: bad.yaml", ["leads back"]),
])
def test_bad_files_are_one_sentence(tmp_path, content, words):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    said = refusal(path)
    assert "bad.yaml" in said and all(word in said for word in words), said


@pytest.mark.parametrize("use", ["base: {}", "model:\n  dims: {}", "model:\n  channels: {}", "data:\n  name: {}",
                                 "run:\n  graphs: {}", "? {}\n: 3"])
def test_a_short_config_makes_no_message_of_a_million_words(tmp_path, use):
    """Lists of ten lists of ten lists; with a few lines more, the message would take all memory."""
    lists = ["&a [x, x, x, x, x, x, x, x, x, x]",
             *(f"&{one} [{', '.join(10 * [f'*{before}'])}]" for before, one in zip("abcd", "bcde"))]
    base = "" if use.startswith("base") else "base: config_om.yaml\n"
    (tmp_path / "bad.yaml").write_text(base + use.format(f"[{', '.join(lists)}]") + "\n")
    assert len(refusal(tmp_path / "bad.yaml")) < 5000


def test_a_missing_key_is_named(tmp_path):
    nested = yaml.safe_load(OM.read_text())
    del nested["optim"]["lr"]
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump(nested))
    with pytest.raises(InputError, match=r"short.yaml.*optim\.lr is missing"):
        load_config(path)


def test_saved_config_reads_back_the_same(tmp_path):
    cfg = load_config(OM, ["run.amp=off", "data.train_ids=1-60", "optim.lr=1e-7"])
    save_config(cfg, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == cfg


@pytest.mark.parametrize("root, name", [
    ("/data/brains", "brains"), ("brains/", "brains"), ("/data/My Brains (v2)", "My-Brains-v2"), ("/d/imagesTr", "d"),
    ("/d/brains/dataset.json", "brains"), ("/d/OASIS_dataset.json", "OASIS"), ("lists/site_3.csv", "site_3"),
    ("../d/v1.2", "v1.2"), (".", re.sub(r"[^\w.-]+", "-", ROOT.name).strip("-.")),
])
def test_the_data_set_names_the_run_and_its_cache(root, name, monkeypatch):
    monkeypatch.chdir(ROOT)
    cfg = load_config(OM, [f"data.root={root}"])
    assert (cfg["data.name"], cfg["data.cache"]) == (name, f"Cache/{name}")


def test_a_name_or_cache_that_is_given_stays(tmp_path):
    assert load_config(OM, ["data.root=/d/brains", "data.name=mine"])["data.cache"] == "Cache/mine"
    assert load_config(OM, ["data.root=/d/brains", "data.cache=/fast/c"])["data.name"] == "brains"
    assert load_config(OM, ["data.root=/d/brains", "data.cache="])["data.cache"] == ""
    with pytest.raises(InputError, match="data.root / gives no name for the run; set data.name"):
        load_config(OM, ["data.root=/"])
    names = {name: load_config(ROOT / f"Config/config_{name}.yaml")["data.name"] for name in ("demo", "hippocampus")}
    assert names == {"demo": "demo", "hippocampus": "hippocampus"}
    save_config(load_config(OM, ["data.root=/d/brains"]), tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", ["data.root=/moved"])["data.name"] == "brains", "as it was resolved"


@pytest.mark.parametrize("name", ["a/b", "../up", ".hidden", "-x", "a b", "brains*"])
def test_a_name_that_no_file_can_have_is_refused_before_anything_is_written(name):
    with pytest.raises(InputError, match=r"data\.name is .*files and folders are named.*--set data\.name=\w"):
        load_config(OM, [f"data.name={name}"])


def test_a_config_of_the_project_is_found_by_its_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("config_demo.yaml") == load_config(ROOT / "Config/config_demo.yaml")
    (tmp_path / "config_demo.yaml").write_text(  # an own file comes first
        "base: config_om.yaml\nmodel: {rec_num: 3}\nloss:\n")  # of loss all lines are commented out
    assert load_config("config_demo.yaml")["model.rec_num"] == 3
    with pytest.raises(InputError, match="none.yaml: there is no such config file"):
        load_config("none.yaml")


@pytest.mark.parametrize("key, text", [
    ("data.val_ids", "017"), ("data.val_ids", "010"), ("data.val_ids", "1:30"), ("data.name", "2024_01_05"),
    ("data.name", "1.10"), ("data.name", "no"), ("data.name", "1e3"), ("data.train_ids", "0x10"),
    ("data.root", "/data/a #b"), ("run.notify", "mail -s 'a: b' me")])
def test_a_text_stays_as_it_is_typed(tmp_path, key, text):
    """YAML 1.1 makes 15, 8, 90, 20240105, 1.1, False, 1000 and 16 of the first eight, and cuts the ninth."""
    assert load_config(OM, [f"{key}={text}"])[key] == text
    section, name = key.split(".")
    quoted = text.replace("'", "''")
    (tmp_path / "own.yaml").write_text(f"base: config_om.yaml\n{section}:\n  {name}: '{quoted}'\n")
    assert load_config(tmp_path / "own.yaml")[key] == text
    save_config(load_config(OM, [f"{key}={text}"]), tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml")[key] == text


def test_numbers_are_decimal_and_truth_has_its_words():
    cfg = load_config(OM, ["run.epochs=0100", "data.in_memory=no", "data.img_size=96,112,96",
                           "run.seed=9007199254740993"])
    assert (cfg["run.epochs"], cfg["data.in_memory"]) == (100, False)
    assert cfg["data.img_size"] == [96, 112, 96], "without brackets, too"
    assert cfg["run.seed"] == 2 ** 53 + 1, "not as a float"
    for wrong in ("run.epochs=1:30", "run.epochs=0x10", "run.epochs=1_000", "optim.lr=\u0663",
                  "data.in_memory=perhaps"):
        with pytest.raises(InputError, match=wrong.split("=")[0]):
            load_config(OM, [wrong])


def test_home_and_variables_in_paths_are_those_of_a_shell(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("NOWHERE", raising=False)
    cfg = load_config(OM, ["run.models=~/runs", "data.root=$SCRATCH/brains", "run.logs=${SCRATCH}/logs"])
    assert cfg["run.models"] == "/home/me/runs" and cfg["data.root"] == "/scratch/me/brains"
    assert cfg["run.logs"] == "/scratch/me/logs" and cfg["data.cache"] == "Cache/brains"
    with pytest.raises(InputError, match=r"run.models is \$NOWHERE/x, but the variable \$NOWHERE is not set"):
        load_config(OM, ["run.models=$NOWHERE/x"])
    with pytest.raises(InputError, match="data.root is empty; name the folder"):
        load_config(OM, ["data.root="])
