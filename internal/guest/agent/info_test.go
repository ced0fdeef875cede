package agent

import (
	"os"
	"testing"
)

func TestInfo(t *testing.T) {
	ps := newProcesses(t, Config{})
	start(t, ps, ExecSpec{Argv: []string{"sleep", "1000"}})
	info, err := ps.Info("1.2.3")
	host, _ := os.Hostname()
	if err != nil || info.Version != "1.2.3" || info.Hostname != host || len(info.BootID) != 36 || info.Uptime <= 0 ||
		info.Processes < 2 || info.Execs != 1 || info.Kernel == "" || info.Arch == "" || info.MemoryTotal < info.MemoryFree {
		t.Errorf("info %+v, %v", info, err)
	}
}
