"""Imports the CUDA build of torchvision beside a CPU build of torch. `install.sh` copies this file to site-packages of
the CPU environment, with a `.pth` file by which every process imports it at its start.

The kernels of that build do not load there, and its import ends with an error, as it gives two operators a fake
implementation that nothing has defined. They are defined here just before. They have no kernels, so calling them fails;
transforms, which image processors use, call neither. Nothing is replaced or patched, torch is not imported before
torchvision is, and a torchvision that was built without CUDA is left as it is.
"""

import sys
from importlib.machinery import PathFinder, SourceFileLoader  # others, such as typing, cost every process milliseconds

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_libraries = []
"""The definitions: they would go with the object that made them."""


class _Loader(SourceFileLoader):
    def exec_module(self, module):
        import torch

        if torch.version.cuda is None and self._is_for_cuda() and not _libraries:
            _libraries.append(torch.library.Library("torchvision", "DEF"))
            for name in OPERATORS:
                _libraries[0].define(name + SCHEMA)
        super().exec_module(module)

    def _is_for_cuda(self):
        with open(self.path.replace("__init__.py", "version.py")) as file:
            return "+cu" in file.read()


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder)
