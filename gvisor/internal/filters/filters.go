// Package filters provides the system call filter of gVisor's kernel in compiled
// form.
//
// gVisor's own builds, by Bazel, precompile it. As a Go module gVisor comes without
// it, and each sandbox would compile it anew, which takes half of the time of a
// restore. This package compiles it with gVisor's own code, as those builds do, into
// a file that is embedded (UPDATE_FILTERS=1 go test ./internal/filters). A test
// compiles it again and compares. A sandbox with other options finds no compiled
// filter, and compiles its own.
package filters

import (
	_ "embed" // the compiled filter
	"encoding/json"
	"fmt"
	"os"
	_ "unsafe" // go:linkname: Bazel's builds generate this, and no other way in exists

	"gvisor.dev/gvisor/pkg/seccomp"
	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	"gvisor.dev/gvisor/runsc/boot/filter"
	"gvisor.dev/gvisor/runsc/boot/filter/config"
)

//go:embed systrap.json
var stored []byte

//go:linkname programs gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var programs map[string]precompiledseccomp.Program

//go:linkname rules gvisor.dev/gvisor/runsc/boot/filter/config.rules
func rules(opt config.Options, vars precompiledseccomp.Values) (allow, deny seccomp.SyscallRules)

// Use registers the compiled filter with gVisor.
func Use() error {
	var p precompiledseccomp.Program
	if err := json.Unmarshal(stored, &p); err != nil {
		return fmt.Errorf("read the compiled filter: %w", err)
	}
	filter.GetPrecompiled("") // makes gVisor's own list, which is empty
	programs[p.Name] = p
	return nil
}

// compile does the work of config.PrecompiledPrograms for the one set of options of
// the helper's sandboxes.
func compile(name string) (precompiledseccomp.Program, error) {
	var none precompiledseccomp.Program
	constructor, err := platform.Lookup(name)
	if err != nil {
		return none, err
	}
	infos := constructor.PrecompiledSeccompInfo()
	if len(infos) != 1 {
		return none, fmt.Errorf("platform %s has %d filters, not one", name, len(infos))
	}
	opt := config.Options{Platform: infos[0]}
	var vars []string
	for v := range opt.Vars() {
		vars = append(vars, v)
	}
	p, err := precompiledseccomp.Precompile(opt.ConfigKey(), vars, func(vars precompiledseccomp.Values) *seccomp.Program {
		allow, deny := rules(opt, vars)
		return &seccomp.Program{
			RuleSets: []seccomp.RuleSet{{Rules: deny.Copy()}, {Rules: allow.Copy(), Action: seccomp.Allow}},
			Options:  config.SeccompOptions(opt),
		}
	})
	if err != nil {
		return none, err
	}
	return p, ownPID(&p)
}

// selfPID is gVisor's variable for the process id.
const selfPID = "self_pid_low32bits"

// ownPID replaces the process id by gVisor's variable for it. systrap's rules contain
// the id of the process that compiles them, while gVisor's other rules use the
// variable.
func ownPID(p *precompiledseccomp.Program) error {
	pid := uint32(os.Getpid())
	var at []int
	for i, word := range p.Bytecode32 {
		if word == pid {
			at = append(at, i)
		}
	}
	if len(at) != 1 || len(p.VarOffsets[selfPID]) != 0 {
		return fmt.Errorf("the process id %d is in the filter %d times: try again, it may be another number by chance", pid, len(at))
	}
	p.Bytecode32[at[0]] = 0
	p.VarOffsets[selfPID] = at
	return nil
}
