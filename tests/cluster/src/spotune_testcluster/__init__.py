r"""A real Kubernetes with KubeRay, spot GPU nodes and faults on one machine, made of Linux namespaces.

cli            what a person types                    pytest_plugin   what a test asks for
    \\                                                 /
     cluster    one cluster seen from the host: up, down, nodes, faults
        |       launch -> init: PID 1 of the cluster and of every node, asked over a Unix socket
        |       control_plane / node: which processes run there, with which flags
     linux, cgroups, network, pki, forward            what they are made of
     binaries, images, template                       what they run: built once, kept outside the tree
"""
