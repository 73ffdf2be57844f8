r"""A real Kubernetes with KubeRay, spot GPU nodes and faults on one machine, made of Linux namespaces.

cli            commands for people                    pytest_plugin   fixtures for tests
    \\                                                 /
     cluster    one cluster seen from the host: up, down, nodes, faults
        |       launch -> init: PID 1 of the cluster and of every node, controlled over a Unix socket
        |       control_plane / node: which processes run there, with which flags
     linux, cgroups, network, pki, forward            the building blocks
     binaries, images, template                       what runs in it: built once, kept outside the checkout
"""
