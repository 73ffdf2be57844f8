// Measures what the validation rules (CEL) of the FinetuneJob cost the API server per write, with its own validator.
//
//	cd benchmarks/cel_rules && go run . --job ../../examples/text-to-sql/finetunejob.yaml ../../manifests/crd.yaml
//
// For each CustomResourceDefinition it prints one line of JSON: memory that is allocated (which does not depend on what
// else the machine does) and processor time for a create, and for an update of the status before and after the first
// checkpoint. Validation against the schema itself is not included. A definition that the API server would refuse,
// because it estimates that a rule is too slow, is an error.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"maps"
	"math"
	"os"
	"runtime"
	"syscall"
	"time"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	v1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"sigs.k8s.io/yaml"
)

const (
	kind        = "FinetuneJob"
	validations = 200
)

type cost struct {
	Kilobytes    int `json:"kilobytes"`
	Microseconds int `json:"cpuMicroseconds"`
}

func main() {
	job := flag.String("job", "", "file with a FinetuneJob")
	flag.Parse()
	for _, path := range flag.Args() {
		costs, err := measure(path, *job)
		if err != nil {
			log.Fatalf("%s: %v", path, err)
		}
		line, err := json.Marshal(map[string]any{"definition": path, "costs": costs})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(string(line))
	}
}

func measure(definition, job string) (map[string]cost, error) {
	structural, err := readSchema(definition)
	if err != nil {
		return nil, err
	}
	validator := cel.NewValidator(structural, true, celconfig.PerCallLimit)
	states := map[string]map[string]any{}
	for name, status := range map[string]map[string]any{
		"create":           nil,
		"beforeCheckpoint": {"phase": "Training", "step": int64(3)},
		"afterCheckpoint": {
			"phase":          "Training",
			"step":           int64(3),
			"lastCheckpoint": map[string]any{"step": int64(2), "time": "2026-01-02T03:04:05Z"},
		},
	} {
		if states[name], err = readJob(job, structural, status); err != nil {
			return nil, err
		}
	}
	costs := map[string]cost{}
	for name, state := range states {
		var old any // absent in a create
		if name != "create" {
			status := maps.Clone(state["status"].(map[string]any))
			status["step"] = int64(2)
			if old, err = readJob(job, structural, status); err != nil {
				return nil, err
			}
		}
		if costs[name], err = validate(validator, structural, state, old); err != nil {
			return nil, err
		}
	}
	return costs, nil
}

func readSchema(path string) (*schema.Structural, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var found *schema.Structural
	for _, document := range bytes.Split(content, []byte("\n---\n")) {
		definition, err := readDefinition(document)
		if err != nil {
			return nil, err
		}
		if definition.Spec.Names.Kind != kind {
			continue
		}
		if found, err = schema.NewStructural(definition.Spec.Validation.OpenAPIV3Schema); err != nil {
			return nil, err
		}
	}
	if found == nil {
		return nil, errors.New("no definition of a " + kind)
	}
	return found, nil
}

func readDefinition(document []byte) (*apiextensions.CustomResourceDefinition, error) {
	external := v1.CustomResourceDefinition{}
	if err := yaml.Unmarshal(document, &external); err != nil {
		return nil, err
	}
	v1.SetObjectDefaults_CustomResourceDefinition(&external)
	definition := apiextensions.CustomResourceDefinition{}
	err := v1.Convert_v1_CustomResourceDefinition_To_apiextensions_CustomResourceDefinition(&external, &definition, nil)
	if err != nil {
		return nil, err
	}
	definition.Status.StoredVersions = []string{external.Spec.Versions[0].Name}
	refused := validation.ValidateCustomResourceDefinition(context.Background(), &definition)
	return &definition, refused.ToAggregate()
}

// readJob reads a job with all defaults and the given status. Whole numbers are int64, as in the API server.
func readJob(path string, structural *schema.Structural, status map[string]any) (map[string]any, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	content, err = yaml.YAMLToJSON(content)
	if err != nil {
		return nil, err
	}
	job := map[string]any{}
	if err := utiljson.Unmarshal(content, &job); err != nil {
		return nil, err
	}
	if status != nil {
		job["status"] = status
	}
	defaulting.Default(job, structural)
	return job, nil
}

func validate(validator *cel.Validator, structural *schema.Structural, job map[string]any, old any) (cost, error) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := processorTime()
	for range validations {
		refused, _ := validator.Validate(context.Background(), nil, structural, job, old, math.MaxInt64)
		if len(refused) > 0 {
			return cost{}, refused.ToAggregate()
		}
	}
	used := processorTime() - start
	runtime.ReadMemStats(&after)
	return cost{
		Kilobytes:    int((after.TotalAlloc - before.TotalAlloc) / validations / 1000),
		Microseconds: int(used.Microseconds() / validations),
	}, nil
}

func processorTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		log.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
