// Podsecurity checks pods against the level "restricted" of the Pod Security Standards, by the code of the API server.
//
// It reads a JSON list of pods from its standard input, and writes a JSON list of {"pod", "reason", "detail"}: one for
// each check that a pod fails.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
)

type violation struct {
	Pod    string `json:"pod"`
	Reason string `json:"reason"`
	Detail string `json:"detail"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	var pods []corev1.Pod
	decoder := json.NewDecoder(os.Stdin)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&pods); err != nil {
		return fmt.Errorf("not a list of pods: %w", err)
	}
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks())
	if err != nil {
		return err
	}
	level := api.LevelVersion{Level: api.LevelRestricted, Version: api.LatestVersion()}
	found := []violation{}
	for _, pod := range pods {
		for _, result := range evaluator.EvaluatePod(level, &pod.ObjectMeta, &pod.Spec) {
			if !result.Allowed {
				found = append(found, violation{pod.Name, result.ForbiddenReason, result.ForbiddenDetail})
			}
		}
	}
	return json.NewEncoder(os.Stdout).Encode(found)
}
