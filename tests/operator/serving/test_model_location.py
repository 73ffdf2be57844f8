"""Where the model of a service is."""

from tests.operator.serving.scenario import Scenario


def test_a_model_in_a_bucket_is_served_from_there_while_its_job_trains_on() -> None:
    scenario = Scenario()
    scenario.job("s3://bucket/sql/export", 120, "Complete")
    scenario.decide()
    served = scenario.status.pending_model
    assert served is not None
    assert served.location == "s3://bucket/sql/export"
    assert served.version.endswith("-step-120")
    scenario.job("", 130, "Training")
    scenario.decide()
    assert scenario.condition("ModelAvailable").status == "True"
    scenario.job("s3://bucket/sql/export", 240, "Complete")
    scenario.decide()
    assert scenario.status.pending_model is not None
    assert scenario.status.pending_model.version == served.version.replace("-step-120", "-step-240")
