package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"agentrun.dev/internal/client/local"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/host/doctor"
)

// exitUnusable is doctor's exit code for a machine that cannot run sandboxes;
// the report has given the reason.
const exitUnusable exitCode = 1

func newDoctorCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say whether sandboxes can run on this host, and what to do if not",
		Long: `Doctor looks at this host and prints a line per check, each problem with its
fix, and the engine that works here. It changes nothing.

The exit code is 1 when no engine works on this host.`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cache, err := assets.CacheFolder()
			if err != nil {
				return err
			}
			state, err := local.DefaultFolder()
			if err != nil {
				return err
			}
			report := doctor.Run(cmd.Context(), doctor.Config{CacheFolder: cache, StateFolder: state})
			if err := printReport(cmd.OutOrStdout(), report, asJSON); err != nil {
				return fmt.Errorf("print the report: %w", err)
			}
			if !report.Usable() {
				return exitUnusable
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	return cmd
}

func printReport(w io.Writer, r doctor.Report, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	return r.Print(w, reportStyle(w, os.Getenv))
}

// reportStyle follows no-color.org and the locale (POSIX: the first of these
// variables that is set decides).
func reportStyle(w io.Writer, getenv func(string) string) doctor.Style {
	noColor := getenv("NO_COLOR") != ""
	locale := getenv("LC_ALL")
	for _, name := range []string{"LC_CTYPE", "LANG"} {
		if locale == "" {
			locale = getenv(name)
		}
	}
	locale = strings.ToLower(locale)
	utf8 := strings.Contains(locale, "utf-8") || strings.Contains(locale, "utf8")
	f, ok := w.(*os.File)
	return doctor.Style{
		Plain: noColor || !utf8,
		Color: !noColor && ok && term.IsTerminal(int(f.Fd())),
	}
}
