"""Ray Serve applications: gateway and replicas as deployments, and a Ray on this machine."""
