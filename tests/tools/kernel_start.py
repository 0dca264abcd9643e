"""What kernels of the gate run first (PYTHONSTARTUP).

A notebook that looks up a recipe off the course's list fails. The cycle collector runs as seldom as
in the tests (conftest.py), and sets aside what is loaded before the first cell.
"""


def hold_to_the_list() -> None:
    """Check the recipe of each `find_record`, and of each `measure` that may give a record."""
    import functools
    import importlib

    @functools.cache
    def listed() -> set:
        from vramlab.measurement.pieces import COURSE_LIST, read_list

        return set(read_list(COURSE_LIST))

    def checked(function):
        @functools.wraps(function)
        def wrapper(recipe, *args, **options):
            from vramlab import model_names

            portable = recipe.model in model_names()  # a path is one machine's
            if options.get("recorded") is not False and portable and recipe not in listed():
                text = (
                    f"{recipe} is not in data/wanted.json, so no GPU records it: add "
                    f"{recipe.to_json()}"
                )
                raise AssertionError(text)
            return function(recipe, *args, **options)

        return wrapper

    for module, name in (("records", "find_record"), ("measure", "measure")):
        module = importlib.import_module(f"vramlab.measurement.{module}")
        setattr(module, name, checked(getattr(module, name)))


def collect_seldom() -> None:
    """Collect after 20,000 new objects instead of 700: a simulation makes hundreds of thousands."""
    import gc

    gc.set_threshold(20_000)
    gc.freeze()


hold_to_the_list()
collect_seldom()
del hold_to_the_list, collect_seldom
