"""Nodes that Ray's own fake autoscaler starts as processes of its head's machine, with warm workers."""

from functools import partial
from typing import Any
from unittest import mock

from ray._private.parameter import RayParams
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

from tests.warm_workers import CLIENT


class WarmNodes(FakeMultiNodeProvider):
    def create_node_with_resources_and_labels(self, *arguments: Any) -> None:
        with mock.patch("ray._private.parameter.RayParams", partial(RayParams, setup_worker_path=CLIENT)):
            super().create_node_with_resources_and_labels(*arguments)  # type: ignore[no-untyped-call]
