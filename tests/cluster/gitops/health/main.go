// Says how healthy objects are to Argo CD, by a script of its resource customizations, and to Flux, by kstatus.
//
//	health SCRIPT.lua < objects.json
//
// Objects are a JSON array; the answer is an array of {argo, argoMessage, flux, fluxMessage}.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	asOfCluster "k8s.io/apimachinery/pkg/util/json"
)

type health struct {
	Argo        string `json:"argo"`
	ArgoMessage string `json:"argoMessage"`
	Flux        string `json:"flux"`
	FluxMessage string `json:"fluxMessage"`
}

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(path string) error {
	script, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	input, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	var objects []map[string]any
	if err := asOfCluster.Unmarshal(input, &objects); err != nil { // whole numbers stay whole
		return err
	}
	answers := make([]health, 0, len(objects))
	for _, object := range objects {
		answer, err := judge(string(script), object)
		if err != nil {
			return err
		}
		answers = append(answers, answer)
	}
	return json.NewEncoder(os.Stdout).Encode(answers)
}

func judge(script string, object map[string]any) (health, error) {
	state := lua.NewState()
	defer state.Close()
	state.SetGlobal("obj", toLua(state, object))
	if err := state.DoString(script); err != nil {
		return health{}, err
	}
	table, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		return health{}, fmt.Errorf("the script returned %s, not a table", state.Get(-1).Type())
	}
	found, err := status.Compute(&unstructured.Unstructured{Object: object})
	if err != nil {
		return health{}, err
	}
	return health{
		Argo:        lua.LVAsString(table.RawGetString("status")),
		ArgoMessage: lua.LVAsString(table.RawGetString("message")),
		Flux:        found.Status.String(),
		FluxMessage: found.Message,
	}, nil
}

// toLua makes of JSON what a script sees: arrays are tables with indices from 1, null is nil.
func toLua(state *lua.LState, value any) lua.LValue {
	switch value := value.(type) {
	case bool:
		return lua.LBool(value)
	case int64:
		return lua.LNumber(value)
	case float64:
		return lua.LNumber(value)
	case string:
		return lua.LString(value)
	case []any:
		table := state.NewTable()
		for _, each := range value {
			table.Append(toLua(state, each))
		}
		return table
	case map[string]any:
		table := state.NewTable()
		for name, each := range value {
			table.RawSetString(name, toLua(state, each))
		}
		return table
	}
	return lua.LNil
}
