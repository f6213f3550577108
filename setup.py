"""Maps the top-level folders to import names.

For example, kernels/ becomes outrider.kernels, and protos/outrider/target becomes outrider.target. All other
packaging settings are in pyproject.toml. `outrider` is a namespace package, and the folders are never
installed as top-level packages such as `kernels` or `shared`.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
PROTOS = Path("protos") / "outrider"
NO_PACKAGES = ["__pycache__*", "*.__pycache__*", "results*"]

roots = {f"outrider.{name}": name for name in ("kernels", "shared", "services", "train", "bench")}
roots |= {
    f"outrider.{path.name}": str(PROTOS / path.name)
    for path in sorted((ROOT / PROTOS).iterdir())
    if path.is_dir()
}
packages = [
    name
    for package, folder in roots.items()
    for name in (
        package,
        *(f"{package}.{below}" for below in find_namespace_packages(folder, exclude=NO_PACKAGES)),
    )
]

setup(
    packages=[*packages, "outrider.models.demo"], package_dir={**roots, "outrider.models.demo": "models/demo"}
)
