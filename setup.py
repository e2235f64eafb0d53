"""Map the top-level folders into the `penstock` namespace: `orchestrator/` imports as `penstock.orchestrator`.

The folder is the layer, so the layers lie open at the root of the repository; in site-packages they live
under one name. Everything static is in pyproject.toml, only the discovery of sub-packages is here.
"""

from setuptools import find_packages, setup

LAYERS = ("conf", "algorithms", "store", "workers", "orchestrator", "recipes")

package_dir = {"penstock": "penstock"}
packages = ["penstock"]
for layer in LAYERS:
    package_dir[f"penstock.{layer}"] = layer
    packages.append(f"penstock.{layer}")
    packages.extend(f"penstock.{layer}.{name}" for name in find_packages(layer))

setup(packages=packages, package_dir=package_dir)
