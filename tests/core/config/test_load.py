from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from onroute.core.config.load import dump_toml, load_config
from onroute.core.config.sections import RunConfig
from onroute.core.config.violations import ConfigError
from tests.core.config.catalogs import CATALOGS, SMALLEST


def load(folder: Path, text: str = "", *overrides: str, base: str = SMALLEST) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(base + text, encoding="utf-8")
    return load_config(file, overrides, CATALOGS)


def complaints(folder: Path, text: str = "", *overrides: str, base: str = SMALLEST) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(folder, text, *overrides, base=base)
    return str(raised.value).splitlines()


def test_the_file_goes_before_the_default_and_the_command_line_before_the_file(tmp_path):
    assert load(tmp_path).optimizer.lr == 1e-6
    assert load(tmp_path, "[optimizer]\nlr = 5e-6").optimizer.lr == 5e-6
    assert load(tmp_path, "[optimizer]\nlr = 5e-6", "--optimizer.lr=2e-6").optimizer.lr == 2e-6


@pytest.mark.parametrize("text", ["5e-6", '"5e-6"', "0.000005"])
def test_a_float_may_be_written_as_number_or_text_in_file_and_flag(tmp_path, text):
    for config in (load(tmp_path, f"[optimizer]\nlr = {text}"), load(tmp_path, "", f"--optimizer.lr={text}")):
        assert config.optimizer.lr == 5e-6
        assert isinstance(config.optimizer.lr, float)


@pytest.mark.parametrize(("text", "value"), [('"auto"', "auto"), ("40", 40)])
def test_a_step_to_resume_from_is_a_number_and_the_other_ways_are_words(tmp_path, text, value):
    assert load(tmp_path, "", f"--run.resume={text}").run.resume == value
    config = load(tmp_path, base=SMALLEST.replace("[run]\n", f"[run]\nresume = {text}\n"))
    assert config.run.resume == value
    assert complaints(tmp_path, "", "--run.resume=atuo") == [
        '[config-type] run.resume takes one of "never", "auto" or integer, got atuo; '
        '--run.resume on the command line; did you mean "auto"?'
    ]


def test_a_whole_number_is_a_float_where_one_is_asked_for(tmp_path):
    lr = load(tmp_path, "[optimizer]\nlr = 1\nclip_norm = 2").optimizer.lr
    assert lr == 1.0
    assert isinstance(lr, float)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("run.steps", '"1"', "integer"),
        ("run.steps", "1.0", "integer"),
        ("run.steps", "true", "integer"),
        ("run.seed", '"none"', "integer"),
        ("optimizer.lr", "true", "float"),
        ("optimizer.lr", '"fast"', "float"),
        ("optimizer.lr", "[1.0]", "float"),
        ("optimizer.betas", "[0.9]", "array of 2 floats"),
        ("optimizer.betas", "[0.9, 0.95, 0.99]", "array of 2 floats"),
        ("tracking.trackers", '"tensorboard"', "array of strings"),
        ("routing.start_check", "1", "boolean"),
        ("run.folder", "3", "string"),
        ("engine.top_k", '"many"', "integer or none"),
        ("environment.options", "3", "table"),
        ("data.layout", '"packd"', 'one of "rows", "packed"'),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_type_and_value(tmp_path, key, value, expected):
    required = [
        'model.path = "m"',
        'environment.name = "sorting"',
        'environment.options.task = "t"',
        'run.folder = "r"',
    ]
    others = [line for line in required if not line.startswith(key)]
    [line] = complaints(tmp_path, base="\n".join([*others, f"{key} = {value}"]))
    assert line.startswith(
        f"[config-type] {key} takes {expected}, got {value}; {key} in {tmp_path}/run.toml; "
    )


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("run.steps=many", "give a whole number, e.g. 100"),
        ("optimizer.lr=fast", "give a number, e.g. 0.5 or 1e-6"),
        ("optimizer.betas=[0.9]", "give an array of 2 floats, e.g. [0.9, 0.95]"),
        ("tracking.trackers=tensorboard", 'give an array of strings, e.g. ["tensorboard"]'),
        ("routing.start_check=1", "give true or false"),
        ("engine.top_k=many", "give a whole number, e.g. 100, or leave the key out"),
        ("data.layout=3", 'give "rows" or "packed"'),
        ("environment.options=3", "give a table, e.g. { key = 1 }"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_one_that_would_do(tmp_path, override, fix):
    lines = complaints(tmp_path, "", f"--{override}")
    [line] = [line for line in lines if line.startswith("[config-type]")]
    assert line.endswith(f"; {fix}")


def test_a_number_where_text_belongs_is_told_to_take_quotes(tmp_path):
    [line] = complaints(tmp_path, base=SMALLEST.replace('"runs/a"', "3"))
    assert line.endswith('give text in quotes, e.g. "abc"')


def test_a_missing_key_is_told_with_the_section_it_belongs_to(tmp_path):
    [line] = complaints(tmp_path, base=SMALLEST.replace('folder = "runs/a"', ""))
    assert line.endswith('set it under [run]: give text in quotes, e.g. "abc"')


def test_a_choice_that_is_misspelt_is_refused_with_the_nearest(tmp_path):
    [line] = complaints(tmp_path, "", "--data.layout=packd")
    assert line == (
        '[config-type] data.layout takes one of "rows", "packed", got packd; '
        '--data.layout on the command line; did you mean "packed"?'
    )


@pytest.mark.parametrize(
    ("text", "code", "wrong", "meant"),
    [
        ("[optimizer]\nlrr = 1", "config-unknown-key", "optimizer.lrr", "optimizer.lr"),
        ("[optimizer]\nlearning_rate = 1", "config-unknown-key", "optimizer.learning_rate", "optimizer.lr"),
        ("[optimizer]\nlearning_rte = 1", "config-unknown-key", "optimizer.learning_rte", "optimizer.lr"),
        ("[optimizer]\ntemperature = 1", "config-unknown-key", "optimizer.temperature", "engine.temperature"),
        ("[optimiser]\nlr = 1", "config-unknown-section", "optimiser", "optimizer"),
        (
            "[algorithm.loss_options]\nclip_hi = 1",
            "config-unknown-key",
            "algorithm.loss_options.clip_hi",
            "algorithm.loss_options.clip_high",
        ),
        (
            "[algorithm]\nclip_high = 1",
            "config-unknown-key",
            "algorithm.clip_high",
            "algorithm.loss_options.clip_high",
        ),
    ],
)
def test_an_unknown_key_is_refused_under_its_full_path_with_the_key_that_was_meant(
    tmp_path, text, code, wrong, meant
):
    [line] = complaints(tmp_path, text)
    kind = code.rpartition("-")[2]
    assert (
        line == f"[{code}] there is no {kind} {wrong}; {wrong} in {tmp_path}/run.toml; did you mean {meant}?"
    )


def test_a_key_outside_all_sections_is_refused(tmp_path):
    [line] = complaints(tmp_path, base="lr = 1\n" + SMALLEST)
    assert "there is no key lr;" in line
    assert "did you mean optimizer.lr?" in line


def test_an_option_of_an_entry_that_takes_none_is_refused(tmp_path):
    [line] = complaints(tmp_path, "[algorithm.advantage_options]\nscale = 2")
    assert "there is no key algorithm.advantage_options.scale" in line


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("--engine.name=hugingface", "did you mean huggingface?"),
        ("--environment.name=zzz", "choose one of sorting"),
        ("--algorithm.advantage=grpoo", "did you mean grpo?"),
        ("--algorithm.loss=cliped", "did you mean clipped?"),
        ('--tracking.trackers=["tensorbord"]', "did you mean tensorboard?"),
    ],
)
def test_a_name_that_no_catalogue_holds_is_refused_with_the_nearest(tmp_path, override, fix):
    key = override[2:].partition("=")[0]
    [line] = [line for line in complaints(tmp_path, "", override) if line.startswith("[config-unknown-name]")]
    assert f"--{key} on the command line" in line
    assert line.endswith(fix)


def test_a_process_without_engines_takes_the_name_of_the_engine_as_it_stands(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(SMALLEST, encoding="utf-8")
    config = load_config(file, ["--engine.name=elsewhere"], replace(CATALOGS, engines=None))
    assert config.engine.name == "elsewhere"


def test_missing_sections_and_keys_are_all_named(tmp_path):
    lines = complaints(tmp_path, base='[environment]\nname = "sorting"\n')
    assert [line.partition(" is not set")[0] for line in lines] == [
        "[config-missing] model.path",
        "[config-missing] run.folder",
        "[config-missing] environment.options.task",
    ]


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    lines = complaints(
        tmp_path,
        '[optimizer]\nlrr = 1\n[engine]\ntemperature = 0.0\n[algorithm]\nloss = "cliped"\n',
        "--data.layout=packd",
        base=SMALLEST.replace('path = "models/tiny"', ""),
    )
    assert sorted(line.partition("]")[0] for line in lines) == [
        "[config-missing",
        "[config-rule",
        "[config-type",
        "[config-unknown-key",
        "[config-unknown-name",
    ]


def test_a_rule_is_not_asked_about_a_key_that_could_not_be_read(tmp_path):
    # The default of microbatch_tokens, 16384, is below 20000, but it is not what the file says.
    lines = complaints(tmp_path, '[engine]\nmax_new_tokens = 20000\n[data]\nmicrobatch_tokens = "32k"')
    assert [line.partition("]")[0] for line in lines] == ["[config-type"]


def test_options_are_filled_in_and_keep_their_declared_types(tmp_path):
    config = load(tmp_path, "", "--algorithm.loss_options.clip_high=0.3", "--environment.options.sizes=[1]")
    assert config.algorithm.loss_options == {"clip_low": 0.2, "clip_high": 0.3}
    assert config.environment.options == {
        "task": "number_sorting",
        "sizes": (1,),
        "limit": None,
        "parameters": {},
    }


def test_an_override_reaches_into_a_free_table_of_an_option(tmp_path):
    config = load(
        tmp_path, "", "--environment.options.parameters.size=4", "--environment.options.parameters.k=x"
    )
    assert config.environment.options["parameters"] == {"size": 4, "k": "x"}


def test_what_an_options_class_refuses_is_a_violation_of_its_table(tmp_path):
    [line] = complaints(tmp_path, "[algorithm.loss_options]\nclip_low = -0.1")
    assert line.startswith(
        "[config-options] clip_low is -0.1, must be at least 0; algorithm.loss_options in "
    )


@pytest.mark.parametrize("text", ["7", "true", "2024-01-01", "a b", "[x]", '"quoted"'])
def test_a_string_key_takes_the_text_of_the_command_line_as_it_stands(tmp_path, text):
    assert load(tmp_path, "", f"--run.folder={text}").run.folder == text.strip('"')


def test_an_optional_key_is_taken_back_with_none(tmp_path):
    assert load(tmp_path, "[engine]\ntop_k = 5", "--engine.top_k=none").engine.top_k is None


@pytest.mark.parametrize(
    "override", ["--run.steps", "run.steps=1", "--steps=1", "--run..x=1", "--=1", "steps"]
)
def test_a_malformed_override_is_refused(tmp_path, override):
    [line] = complaints(tmp_path, "", override)
    assert line.startswith(f"[config-override] {override} is not of the form --section.key=value")


def test_a_space_in_place_of_the_equals_sign_is_one_mistake_and_the_line_to_write_is_told(tmp_path):
    base = SMALLEST.replace('folder = "runs/a"', "")
    for override in (["--run.folder", "runs/x"], ["--run.folder runs/x"]):
        assert complaints(tmp_path, "", *override, "--run.seed=3", base=base) == [
            "[config-override] --run.folder runs/x has a space in place of =; command line; "
            "write --run.folder=runs/x"
        ]


def test_a_key_without_value_does_not_swallow_the_next_override(tmp_path):
    [line] = complaints(tmp_path, "", "--run.steps", "--run.seed=3")
    assert line.startswith("[config-override] --run.steps is not of the form")


def test_an_override_where_the_run_file_belongs_is_told_to_come_after_it():
    with pytest.raises(ConfigError, match="give the run file first and what overrides it after it"):
        load_config(Path("--optimizer.lr=1e-6"), ["run.toml"], CATALOGS)


def test_an_override_into_a_value_is_refused_even_when_the_file_is_right(tmp_path):
    [line] = complaints(tmp_path, "", "--model.path.x=1")
    assert "reaches into model.path, which is a value and not a table" in line


def test_no_value_can_smuggle_in_a_second_key(tmp_path):
    assert load(tmp_path, "", "--run.folder=1\nseed = 5").run.folder == "1\nseed = 5"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[model\npath = 1", "line 1"),
        (b"[model]\npath = models/tiny\n", "line 2, column 8"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_toml_is_refused_in_one_line_with_the_place(tmp_path, content, says):
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_config(file, (), CATALOGS)
    [line] = str(raised.value).splitlines()
    assert says in line
    assert str(file) in line


def test_a_missing_file_and_a_folder_are_refused_in_one_line(tmp_path):
    for path, says in ((tmp_path / "nope.toml", "there is no such file"), (tmp_path, "this is a folder")):
        with pytest.raises(ConfigError) as raised:
            load_config(path, (), CATALOGS)
        [line] = str(raised.value).splitlines()
        assert says in line
        assert str(path) in line


def test_the_resolved_file_loads_to_the_same_config(tmp_path):
    full = load(
        tmp_path,
        "[engine]\ntop_k = 5\n[tracking]\ntrackers = []\n[optimizer]\nclip_norm = inf\nlr = 3e-4\n",
        '--environment.options.parameters={a = [1, {b = 2.5}], c = "ü"}',
        "--environment.options.limit=3",
    )
    for config in (load(tmp_path), full):
        file = tmp_path / "resolved.toml"
        file.write_text(dump_toml(config), encoding="utf-8")
        assert load_config(file, (), CATALOGS) == config


def test_a_config_error_survives_pickling_with_all_its_lines(tmp_path):
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, "[optimizer]\nlrr = 1\neps = -1.0")
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)
    assert len(again.violations) == 2
    assert again.exit_code == 2
