from miles.utils.sglang_source import read_flags

SOURCE = """
class Other:
    not_a_flag: int = 1

class ServerArgs:
    model_path: A[str, Arg(help="The model.", aliases=["--model"]), NS("model")]
    tp_size: A[int, Arg(help="Size.", aliases=["--tensor-parallel-size"])] = 1
    enable_metrics: A[bool, "Metrics.", NS("m")] = False
    plain: bool = False
    odd: A[bool, Arg(help="x", action=Custom)] = False
    maybe: A[Optional[bool], "x"] = None

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--reasoning-parser", type=str)
        parser.add_argument("--old-switch", action="store_true")
"""


def test_flags_are_fields_aliases_and_added_arguments():
    assert read_flags(SOURCE) == {
        "--model-path",
        "--model",
        "--tp-size",
        "--tensor-parallel-size",
        "--enable-metrics",
        "--plain",
        "--odd",
        "--maybe",
        "--reasoning-parser",
        "--old-switch",
    }
