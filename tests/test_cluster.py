"""The sites' settings, as bash gives them to a rank; what the launcher prints of them and what a run keeps."""
import json
import os
import resource
import shlex
import sys
from pathlib import Path

import pytest

from tests import launching
from tests.tiny import ROOT, arguments, launcher_environment, make_data, stand_in

SITES = sorted(path.stem for path in (ROOT / "Config/cluster").glob("*.env"))
BEFORE = {"NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "eth7", "NCCL_NET_DISABLE": "1",
          "PYTORCH_ALLOC_CONF": "expandable_segments:True", "MIOPEN_DISABLE_CACHE": "1"}
SOURCE = 'set -ua; source "Config/cluster/$SITE.env"; set +a; env -0'


def settings(site, nodes, job, says="", **more):
    """Environment of a shell after it has read a site's file, saying nothing else on standard error."""
    environment = {"PATH": os.environ["PATH"], "SITE": site, "NODE_COUNT": str(nodes), **BEFORE, **more}
    if job:
        environment["SLURM_JOB_ID"] = job
    done = launching.run(["bash", "-c", SOURCE], cwd=ROOT, env=environment)
    assert done.returncode == 0 and (says in done.stderr if says else not done.stderr), done.stderr
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


@pytest.mark.parametrize("site", SITES)
def test_every_file_can_be_read_inside_and_outside_a_job(site):
    assert settings(site, 8, f"test-{os.getpid()}")["PATH"] and settings(site, 1, "")["PATH"]


def test_dawn():
    found = settings("dawn", 8, f"test-{os.getpid()}")
    assert found["CCL_WORKER_AFFINITY"] == "auto" and found["CCL_ZE_CACHE_OPEN_IPC_HANDLES_THRESHOLD"] == "10000"
    assert found["I_MPI_PMI_LIBRARY"] == "/usr/local/software/slurm/current-rhel8/lib/libpmi2.so"
    assert found["ZES_ENABLE_SYSMAN"] == "1", "else the driver does not report its free memory"
    assert found["I_MPI_HYDRA_BOOTSTRAP"] == "slurm" and "PYTORCH_ALLOC_CONF" not in found


def test_lumi_keeps_its_kernel_database_on_the_node():
    job = f"test-{os.getpid()}"
    found = settings("lumi", 8, job)
    assert found["MIOPEN_USER_DB_PATH"] == found["MIOPEN_CUSTOM_CACHE_DIR"] == f"/tmp/miopen_cache_{job}"
    assert os.path.isdir(found["MIOPEN_USER_DB_PATH"]) and "MIOPEN_DISABLE_CACHE" not in found
    assert (found["MIOPEN_FIND_MODE"], found["MIOPEN_LOG_LEVEL"], found["PREFLIGHT_SECONDS"]) == ("1", "3", "600")
    assert settings("lumi", 8, job, PREFLIGHT_SECONDS="90")["PREFLIGHT_SECONDS"] == "90", "the user's own counts"


CACHES = {"lumi": ("MIOPEN_USER_DB_PATH", "miopen_cache"), "dawn": ("SYCL_CACHE_DIR", "sycl_cache"),
          "gilbreth": ("CUDA_CACHE_PATH", "cuda_cache")}


@pytest.mark.parametrize("site", CACHES)
def test_kernels_are_kept_where_nobody_else_can_put_his_own(site):
    job, (name, stem) = f"test-{os.getpid()}-{site}", CACHES[site]
    usual = Path(f"/tmp/{stem}_{job}")
    usual.mkdir(mode=0o755)  # by an earlier start of the same job
    try:
        assert settings(site, 2, job)[name] == str(usual) and usual.stat().st_mode & 0o777 == 0o700
        usual.rmdir()
        elsewhere = usual.with_name(f"{usual.name}-elsewhere")
        elsewhere.mkdir()
        usual.symlink_to(elsewhere)
        avoided = settings(site, 2, job, says="belongs to somebody else: a new folder beside it is used")[name]
        assert avoided.startswith(f"{usual}.") and Path(avoided).stat().st_mode & 0o777 == 0o700
        usual.unlink()
        if os.geteuid() == 0:  # who alone can give a folder to somebody else
            usual.mkdir()
            os.chown(usual, 12345, 12345)
            assert settings(site, 2, job, says="belongs to somebody else")[name].startswith(f"{usual}.")
    finally:
        for path in Path("/tmp").glob(f"{usual.name}*"):
            path.unlink() if path.is_symlink() else path.rmdir()


def test_options_of_the_site_reach_the_scripts_too(tmp_path):
    """A stand-in for Python writes down its words; the leak test is the one script that trains without the launcher.
    As it makes no run, there is none to report, whatever an earlier test has left."""
    python = stand_in(tmp_path / "python", f'echo "$@" >> {tmp_path}/words; [[ $1 == -c ]] && echo 1; exit 0')
    environment = launcher_environment(1, CLUSTER="lumi", PYTHON=python, STRATB=str(tmp_path / "out"))
    (tmp_path / "out/Models/run").mkdir(parents=True)
    done = launching.run(["bash", str(ROOT / "Scripts/bash_train_stratB.sh"), "--set", "run.deadline_first_s=9"],
                         env=environment, timeout=60)
    training = next(line for line in (tmp_path / "words").read_text().splitlines() if "OM_train_3modes.py" in line)
    site, own = training.index("run.deadline_first_s=2700"), training.index("run.deadline_first_s=9")
    assert site < own, "what the user says comes later and counts"
    assert done.returncode == 43 and "steps of rank 0" not in done.stdout


def test_the_leak_test_takes_volumes_of_the_size_that_it_is_given(tmp_path):
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/bash
[[ $1 == -c ]] && echo 1
[[ $* == *Dataloader.synthetic* ]] && mkdir -p "$4" && touch "$4/dataset.json" && echo "${{@: -1}}" >> {tmp_path}/made
[[ $* == *OM_train_3modes.py* ]] && grep -o "data.root=[^ ]*" <<< "$*" >> {tmp_path}/read
exit 0
""")
    python.chmod(0o755)
    for side in ("16", "24", "24"):
        environment = launcher_environment(1, PYTHON=str(python), STRATB=str(tmp_path / "out"), SIDE=side)
        launching.run(["bash", ROOT / "Scripts/bash_train_stratB.sh"], env=environment, timeout=60)
    read = (tmp_path / "read").read_text().split()
    assert (tmp_path / "made").read_text().split() == ["16", "24"] and read[0] != read[1] == read[2]


@pytest.mark.parametrize("script", [ROOT / "bash_train_multi_nodes.sh", *sorted((ROOT / "Scripts").glob("bash_*.sh"))],
                         ids=lambda script: script.name)
def test_no_script_works_in_another_clone_because_of_a_users_cdpath(tmp_path, script):
    """Nor does PYTHONSAFEPATH hide the modules from it. A stand-in for Python says where it is and what it is given."""
    python = stand_in(tmp_path / "python", f"""echo "$PWD: $* ${{PYTHONSAFEPATH-}}" >> {tmp_path}/told
        [[ $* == *safetensors ]] || exit 43""")
    clones = tmp_path / "clones"
    (clones / ROOT.name / "Scripts").mkdir(parents=True)
    words = {"bash_infer.sh": ["prepare"], "bash_train_universal.sh": ["--folder", tmp_path]}.get(script.name, [])
    environment = launcher_environment(1, PYTHON=python, STRATB=str(tmp_path), SMOKE_LOGS=str(tmp_path),
                                       CDPATH=str(clones), PYTHONSAFEPATH="hidden")
    done = launching.run(["bash", script.relative_to(ROOT.parent), *words], cwd=ROOT.parent, env=environment)
    told = (tmp_path / "told").read_text()
    assert done.returncode == 43 and str(ROOT) in told and "clones" not in told and "hidden" not in told, done.stderr


def test_the_script_knows_folders_and_cores_where_the_tools_are_those_of_a_mac(tmp_path):
    for name in ("nproc", "realpath", "stat"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{name}: illegal option' >&2\nexit 127\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    command = ["bash", ROOT / "Scripts/bash_train_universal.sh", "--folder", "a net", "--into", "net.safetensors"]
    done = launching.run([*command, "--print"], cwd=tmp_path, env=environment)
    printed = [shlex.split(line)[1:] for line in done.stdout.splitlines()]
    assert printed[0][printed[0].index("--out") + 1] == f"{tmp_path}/a net/anatomies" and int(printed[0][-1]) >= 1
    assert ["rm", "-rf", f"{tmp_path}/a net/export"] in printed and not done.stderr
    assert printed[-2][-1] == f"{tmp_path}/net.safetensors"


def test_the_help_of_every_script_is_printed_by_a_macs_sed_too():
    """It takes a } right after a substitution for a flag of it."""
    scripts = [ROOT / "bash_train_multi_nodes.sh", *(ROOT / "Scripts").glob("*.sh")]
    assert not [script.name for script in scripts if "p}'" in script.read_text()]


@pytest.mark.parametrize("ranks, said", [("", "torch cannot count the devices"), ("0", "RANKS=0: give the number"),
                                         ("two", "RANKS=two: give the number")])
def test_a_script_that_does_not_know_its_number_of_ranks_says_so_in_one_sentence(ranks, said):
    done = launching.run(["bash", ROOT / "Scripts/bash_diagnose_leak.sh"], timeout=60,
                         env=launcher_environment(ranks, PYTHON="false"))
    assert done.returncode == 43 and done.stderr.startswith(f"error: {said}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("site", ["gilbreth", "torch-hpc"])
def test_nccl_on_one_node_and_on_several(site):
    one, several = settings(site, 1, ""), settings(site, 2, "")
    both = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_P2P_LEVEL": "NVL", "NCCL_SHM_DISABLE": "0"}
    alone = {"NCCL_IB_DISABLE": "1", "NCCL_NET_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    assert {**both, **alone}.items() <= one.items() and {**both, "NCCL_IB_DISABLE": "0"}.items() <= several.items()
    assert not {"NCCL_NET_DISABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & set(several)


def test_modules_are_loaded_in_their_order_and_by_the_launcher_only(tmp_path):
    calls = tmp_path / "calls"
    modules = {"BASH_FUNC_module%%": f'() {{ echo "$@" >> {calls}; }}'}
    settings("gilbreth", 2, "", **modules)
    assert calls.read_text().split() == "load external load cuda anaconda".split()
    settings("gilbreth", 2, "", RANK="3", **modules)
    assert calls.read_text().count("external") == 1


@pytest.mark.parametrize("script", ["bash_infer.sh", "bash_smoke.sh"])
def test_modules_are_loaded_by_a_script_that_is_started_where_a_rank_was(tmp_path, script):
    calls = tmp_path / "calls"
    modules = {"BASH_FUNC_module%%": f'() {{ echo "$@" >> {calls}; }}'}
    launching.run(["bash", ROOT / "Scripts" / script, *(["prepare"] if "infer" in script else [])], timeout=60,
                  env={**launcher_environment(1, CLUSTER="gilbreth", PYTHON="false", **modules), "RANK": "0"})
    assert calls.read_text().split() == "load external load cuda anaconda".split()


def test_a_sites_file_may_ask_for_a_variable_that_is_not_set(tmp_path):
    """As those that extend LD_LIBRARY_PATH do, and modules. Afterwards the caller is as strict as before."""
    (tmp_path / "Config/cluster").mkdir(parents=True)
    (tmp_path / "Config/cluster/mine.env").write_text("LD_LIBRARY_PATH=/opt/site/lib:$LD_LIBRARY_PATH\n")
    code = f'source "{ROOT}/Scripts/settings.sh"; load_settings; printenv LD_LIBRARY_PATH; echo "$-"'
    environment = {"PATH": os.environ["PATH"], "CLUSTER": "mine"}
    for flags in ("", "set -u; "):
        done = launching.run(["bash", "-c", flags + code], cwd=tmp_path, env=environment)
        path, left = done.stdout.split()
        assert path == "/opt/site/lib:" and ("u" in left) == bool(flags) and "a" not in left, done.stderr


@pytest.mark.slow
def test_the_launcher_prints_the_settings_and_the_run_keeps_them(tmp_path):
    make_data(tmp_path)
    environment = launcher_environment(1, CLUSTER="gilbreth", NCCL_DEBUG="WARN")
    command = ["bash", str(ROOT / "bash_train_multi_nodes.sh"), *arguments(tmp_path, run__epochs=1)]
    done = launching.run(command, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout
    kept = json.loads(next(tmp_path.glob("Models/*/launches/0000/launch.json")).read_text())["settings"]
    for name, value in {"NCCL_NET_DISABLE": "1", "NCCL_DEBUG": "WARN", "CLUSTER": "gilbreth"}.items():
        assert f"  {name}={value}\n" in done.stdout and kept[name] == value


@pytest.mark.parametrize("hard", [3000, None])
def test_the_launcher_raises_limits_on_files(tmp_path, hard):
    """A stand-in for Python says what it is given, and that it refuses the rest."""
    python = stand_in(tmp_path / "python", """[[ $1 == -c ]] && exit  # whether it has what is needed
        echo "open files: $(ulimit -n), core files: $(ulimit -c), blocks: $(ulimit -f)"; exit 43""")
    hard = hard or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = f"ulimit -Sn 500; ulimit -Hn {hard}; ulimit -Sf 50000; ulimit -Hf 90000"
    words = ["bash", "-c", f'{limits}; exec bash "$0"', ROOT / "bash_train_multi_nodes.sh"]
    done = launching.run(words, env=launcher_environment(1, PYTHON=python), timeout=60)
    said = f"open files: {min(hard, 65536)}, core files: 0, blocks: 90000"
    assert said in done.stdout and done.returncode == 43, done.stdout


def test_an_unknown_site_is_refused_with_the_known_ones():
    done = launching.run(["bash", ROOT / "bash_train_multi_nodes.sh"], timeout=60,
                         env=launcher_environment(1, CLUSTER="mars"))
    known = sorted(path.name for path in (ROOT / "Config/cluster").glob("*.env"))
    assert {"dawn.env", "gilbreth.env", "local.env", "lumi.env", "torch-hpc.env"} <= set(known), "those of the records"
    assert done.returncode == 43 and f"known are {', '.join(known)}." in done.stdout
