"""For the sitecustomize files of tests: change a module of a process that knows nothing of it."""
import importlib.machinery
import sys


class Finder:
    """Lets the real finder find one module, and changes it when it has been executed."""

    def __init__(self, wanted, change):
        self.wanted, self.change = wanted, change

    def find_spec(self, name, path=None, target=None):
        if name != self.wanted:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.change(module)
        spec.loader.exec_module = exec_module
        return spec


def after_import(name, change):
    """Call change(module) as soon as the module of this name has been imported."""
    sys.meta_path.insert(0, Finder(name, change))
