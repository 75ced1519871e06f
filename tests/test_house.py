"""The house rules hold for this tree, and each check fails on a planted fault."""

import importlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import house
import pytest

ROOT = Path(__file__).parents[1]
CODE = ("fuelflow", "tests", "bench")
LOADED_ON_FIRST_USE = ("flax.nnx", "flax.linen", "orbax", "rich", "sklearn")
IMPORT_BUDGET_SECS = 0.060
NUM_IMPORTS = 5


@pytest.fixture
def plant(tmp_path):
    """Write files into a small tree of its own and give its root."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def run(*command, **options):
    """Run a command at the root of the repository and keep what it says."""
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, **options
    )


def assert_passes(*command):
    done = run(sys.executable, "-m", *command)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


# This tree.


def test_imports_run_downwards():
    assert house.import_faults(ROOT) == []


def test_every_module_has_its_floor():
    assert house.room_faults(ROOT) == []


def test_the_front_door_is_imports_and_one_sorted_list():
    assert house.front_door_faults(ROOT) == []


def test_every_public_name_can_be_had():
    fuelflow = importlib.import_module("fuelflow")
    missing = [name for name in fuelflow.__all__ if not hasattr(fuelflow, name)]

    assert missing == []


def test_the_version_is_the_installed_one():
    fuelflow = importlib.import_module("fuelflow")
    installed = importlib.metadata.version("fuelflow")

    assert getattr(fuelflow, "__version__", installed) == installed


def test_modules_and_functions_stay_short():
    assert house.size_faults(ROOT) == []


@pytest.mark.parametrize("folders", [("fuelflow",), CODE], ids=["library", "all"])
def test_suppressions_are_few_and_name_their_rule(folders):
    assert house.suppression_faults(ROOT, *folders) == []


def test_no_file_knows_the_machine_it_was_written_on():
    assert house.machine_faults(ROOT, house.repository_files(ROOT)) == []


def test_ci_runs_the_test_command_of_the_readme():
    assert house.ci_faults(ROOT) == []


def test_ci_can_be_executed():
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_ruff_finds_nothing():
    assert_passes("ruff", "check", ".")


def test_everything_is_formatted():
    assert_passes("ruff", "format", "--check", ".")


def test_pyright_finds_nothing():
    assert_passes("pyright", "--pythonpath", sys.executable)


# What `import fuelflow` costs.


def import_report(statement):
    """What a fresh interpreter says of one import made after jax's and optax's."""
    script = f"""
import json, sys, time
import jax, optax
settings = {{name: repr(value) for name, value in jax.config.values.items()}}
start = time.process_time()
{statement}
secs = time.process_time() - start
after = {{name: repr(value) for name, value in jax.config.values.items()}}
print(json.dumps([secs, sorted(sys.modules), settings == after]))
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend is up
"""
    # With the first, two ways to ask for devices would be refused for that alone. With
    # the second every interpreter compiles the sources anew, which pip does at install.
    unwanted = ("XLA_FLAGS", "PYTHONDONTWRITEBYTECODE")
    environment = {k: v for k, v in os.environ.items() if k not in unwanted}
    done = run(sys.executable, "-c", script, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_leaves_heavy_packages_settings_and_devices_alone():
    _, modules, settings_kept = import_report("import fuelflow")
    loaded = [name for name in LOADED_ON_FIRST_USE if name in modules]

    assert "fuelflow" in modules
    assert loaded == []
    assert settings_kept


def test_import_costs_little_more_than_jax_and_optax():
    # Each interpreter times fuelflow's share alone, jax and optax being loaded, so the
    # half second that those take, and its scatter, is in no figure. It is time of this
    # process's own, of which what else the machine does is no part.
    import_report("import fuelflow")  # writes the bytecode
    secs = [import_report("import fuelflow")[0] for _ in range(NUM_IMPORTS)]

    assert statistics.median(secs) <= IMPORT_BUDGET_SECS, secs


def test_the_import_report_sees_a_heavy_import():
    secs, modules, _ = import_report("import flax.nnx")
    loaded = [name for name in LOADED_ON_FIRST_USE if name in modules]

    assert "flax.nnx" in loaded
    assert secs > IMPORT_BUDGET_SECS


def test_the_import_report_sees_a_changed_setting():
    _, _, settings_kept = import_report("jax.config.update('jax_enable_x64', True)")

    assert not settings_kept


def test_the_import_report_sees_a_device_in_use():
    with pytest.raises(AssertionError, match="before backends are initialized"):
        import_report("jax.devices()")


# Planted faults.


@pytest.mark.parametrize(
    ("room", "line", "target"),
    [
        ("step", "from fuelflow.run import Trainer", "run"),
        ("step", "import fuelflow.graph.graph", "graph"),
        ("step", "from fuelflow import watch", "watch"),
        ("step", "from ..graph import Graph", "graph"),
        ("step", "from .. import graph", "graph"),
        ("step", "import fuelflow", house.FRONT_DOOR),
        ("step", "from fuelflow import Graph", house.FRONT_DOOR),
        ("step", "import_module('fuelflow.data')", "data"),
        ("model", "from fuelflow.devices import mesh", "devices"),
        ("devices", "from fuelflow.model import names", "model"),
        ("metrics", "from fuelflow.data import Batch", "data"),
        ("data", "from fuelflow.metrics import History", "metrics"),
        ("run", "def f():\n    from fuelflow.watch import Monitor", "watch"),
        ("run", "if TYPE_CHECKING:\n    from fuelflow.watch import M", "watch"),
        ("watch", "from fuelflow.examples import digits", "examples"),
        ("watch", "from fuelflow.cli import main", "cli"),
    ],
)
def test_an_upward_import_is_found(plant, room, line, target):
    root = plant(
        {
            "fuelflow/graph/__init__.py": "",
            "fuelflow/watch/__init__.py": "",
            f"fuelflow/{room}/part.py": f'"""A part."""\n{line}\n',
        }
    )

    (fault,) = house.import_faults(root)
    assert f"`{room}` must not import `{target}`" in fault
    assert f"{room}/part.py:" in fault


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("cli", "import fuelflow as ff"),
        ("examples", "import fuelflow as ff"),
        ("run", "from fuelflow.step import TrainingLoop"),
        ("run", "from fuelflow.run.handle import RunHandle"),
        ("step", "from fuelflow._errors import RecompileError"),
        ("step", "from fuelflow_extras.watch import chart"),
        ("step", "import jax"),
    ],
)
def test_a_downward_import_is_no_fault(plant, room, line):
    root = plant({f"fuelflow/{room}/part.py": f"{line}\n"})

    assert house.import_faults(root) == []


def test_a_module_in_no_room_is_found(plant):
    root = plant({"fuelflow/utils.py": "", "fuelflow/step/__init__.py": ""})

    assert house.room_faults(root) == ["`fuelflow/utils` has no floor"]


FRONT_DOOR = '"""Doc."""\nfrom fuelflow.step import A, b\n'


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (FRONT_DOOR, "`__all__` is missing"),
        (FRONT_DOOR + '__all__ = ["b", "A"]', "must be sorted"),
        (FRONT_DOOR + '__all__ = ["A", "A", "b"]', "each name once"),
        (FRONT_DOOR + '__all__ = ["A"]', "`b` is not in `__all__`"),
        (FRONT_DOOR + '__all__ = ["A", "b", "c"]', "`c` is not imported"),
        (FRONT_DOOR + '__all__ = ["A", "b"]\nX = 1', "line 4: neither"),
        (FRONT_DOOR + '__all__ = ["A", "b"]\ndef f(): ...', "line 4: neither"),
        ('"""Doc."""\nfrom .step import A\n__all__ = []', "line 2: neither"),
        ("import jax\n__all__ = ['jax']", "opens with its docstring"),
    ],
)
def test_a_fault_of_the_front_door_is_found(plant, source, fault):
    root = plant({"fuelflow/__init__.py": source})

    assert any(fault in line for line in house.front_door_faults(root))


def test_a_right_front_door_has_no_fault(plant):
    ending = '__all__ = ["A", "__version__", "b"]\n__version__ = "1"\n'
    root = plant({"fuelflow/__init__.py": FRONT_DOOR + ending})

    assert house.front_door_faults(root) == []


def test_a_long_module_and_a_long_function_are_found(plant):
    root = plant(
        {
            "fuelflow/module.py": "x = 1\n" * 451,
            "fuelflow/function.py": "def f():\n" + "    x = 1\n" * 70,
            "fuelflow/edge.py": "def f():\n" + "    x = 1\n" * 69 + "x = 1\n" * 380,
        }
    )

    function, module = house.size_faults(root)
    assert "function.py:1: `f` has 71 lines" in function
    assert "module.py: 451 lines" in module


def suppression(rule=""):
    """A suppression that is none in this file."""
    return f"x = 1  # {'no' + 'qa'}{rule}\n"


def test_a_suppression_without_a_rule_is_found(plant):
    bare = suppression() + f"x = 1  # {'type'}: ignore\n" + f"# {'pyright'}: basic\n"
    root = plant({"fuelflow/part.py": bare + "x = 1\n" * 2000})

    assert house.suppression_faults(root, "fuelflow") == [
        f"fuelflow/part.py:{line}: names no rule" for line in (1, 2, 3)
    ]


@pytest.mark.parametrize(("num_suppressions", "num_faults"), [(2, 0), (3, 1)])
def test_the_third_suppression_in_a_thousand_lines_is_one_too_many(
    plant, num_suppressions, num_faults
):
    lines = suppression(": E501") * num_suppressions
    lines += "x = 1\n" * (1000 - num_suppressions)
    root = plant({"fuelflow/part.py": lines})

    assert len(house.suppression_faults(root, "fuelflow")) == num_faults


@pytest.mark.parametrize(
    "line",
    ["see /" + "work/main", "'/" + "root/.cache'", "https://pypi" + ".org/simple"],
)
def test_a_machine_in_a_file_is_found(plant, line):
    root = plant(
        {"notes.md": f"fine\n{line}\n", "fine.md": "./work/x ~/home/y a/root/\n"}
    )

    faults = house.machine_faults(root, sorted(root.iterdir()))
    assert faults == [f"notes.md:2: {line}"]


@pytest.mark.parametrize(
    ("readme", "fault"),
    [
        ("No command.\n", "shows no command"),
        ("```sh\npip install x && pytest\n```\n", "lacks `pip install x && pytest`"),
    ],
)
def test_a_readme_that_ci_does_not_follow_is_found(plant, readme, fault):
    root = plant({"README.md": readme, ".ci/run": "pytest\n"})

    (found,) = house.ci_faults(root)
    assert fault in found


def test_a_readme_that_ci_follows_has_no_fault(plant):
    readme = (
        "```sh\npip install fuelflow\n```\n\n```bash\npip install x && pytest\n```\n"
    )
    root = plant({"README.md": readme, ".ci/run": "(\n  pip install x && pytest\n)\n"})

    assert house.ci_faults(root) == []
