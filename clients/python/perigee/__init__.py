"""A client of Perigee's API: jobs, VMs, volumes, images and hosts of one cluster."""

from .client import Client, JobFile
from .problem import Gone, Problem
from .transport import Stream

__all__ = ["Client", "Gone", "JobFile", "Problem", "Stream"]
