"""A run that is submitted again is a new attempt in the run directory of the old one."""

from typing import Any

from tests.support.rendered import container_of
from tests.unit.kubernetes.site import Site, every_workload


def env_of(site: Site, name: str) -> dict[str, Any]:
    container = container_of(site.server.job(name, kind=site.workload))
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


@every_workload
def test_each_submission_can_be_told_from_those_before(site: Site) -> None:
    """By a label where the cluster has one, which is new for each Job; else by a variable."""
    run = site.submit()
    seen = [env_of(site, run.name)]
    for _ in range(2):
        site.server.finish(run.name, succeeded=False)
        site.launcher.resubmit(run)
        seen.append(env_of(site, run.name))
    starts = [env.pop("TRAIN_START") for env in seen]
    assert seen == [seen[0]] * 3
    if site.workload == "PyTorchJob":
        assert starts[0] == run.name and len(set(starts)) == 3
    else:
        label = "metadata.labels['batch.kubernetes.io/controller-uid']"
        assert starts == [{"fieldRef": {"fieldPath": label}}] * 3


@every_workload
def test_a_point_that_goes_on_can_be_told_from_its_earlier_submission(site: Site) -> None:
    run = site.submit(sweep={"grid": {"--lr": ["1", "2"]}})
    name = f"{run.name}-1"
    before = env_of(site, name)["TRAIN_START"]
    for index, succeeded in enumerate((True, False)):
        site.server.finish(f"{run.name}-{index}", succeeded=succeeded)
    site.launcher.resubmit(run)
    after = env_of(site, name)["TRAIN_START"]
    assert (before == after) is (site.workload != "PyTorchJob")
    assert env_of(site, f"{run.name}-0")["TRAIN_START"] != after or before == after
