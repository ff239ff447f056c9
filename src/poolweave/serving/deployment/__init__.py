"""A whole deployment from one TOML file: registry, instances and door as processes that are kept running."""

from poolweave.serving.deployment.config import DeploymentConfig, load_deployment
from poolweave.serving.deployment.deployment import Deployment, Onlooker
from poolweave.serving.deployment.keeper import StartStopped

__all__ = ["Deployment", "DeploymentConfig", "Onlooker", "StartStopped", "load_deployment"]
